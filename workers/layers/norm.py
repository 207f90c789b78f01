"""RMS normalisation with its weight."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.norm import rms_norm


@dataclass(frozen=True, slots=True)
class RmsNorm:
    weight: Tensor  # [D]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
