"""Feed-forward layer, with or without a gate."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.workers.layers.linear import Linear, RowParallelLinear


@dataclass(frozen=True, slots=True)
class Mlp:
    """Feed-forward layer. A gated activation computes act(gate) * up from `gate_up`'s output."""

    gate_up: Linear  # only the up projection if there is no gate
    down: Linear | RowParallelLinear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(x)))
