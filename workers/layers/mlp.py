"""The feed-forward layer, gated or not."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.workers.layers.linear import Linear, RowParallelLinear


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Linear  # up alone, where there is no gate
    down: Linear | RowParallelLinear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(x)))
