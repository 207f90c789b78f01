"""The gated feed-forward layer."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.activation import silu_mul
from penstock.workers.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class Mlp:
    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))
