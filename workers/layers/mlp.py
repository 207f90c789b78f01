"""Feed-forward layer, with or without a gate."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.workers.layers.linear import Linear, RowParallelLinear


@dataclass(frozen=True, slots=True)
class Mlp:
    """Feed-forward layer. A gated activation maps the output of `gate_up` to act(gate) * up."""

    gate_up: Linear  # gate and up projections; without a gate, only the up projection
    down: Linear | RowParallelLinear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(x)))
