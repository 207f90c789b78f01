"""Normalisations with their weights."""

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from penstock.kernels.norm import rms_norm


@dataclass(frozen=True, slots=True)
class RmsNorm:
    weight: Tensor  # [D]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Where its weights go, by their names in the checkpoint."""
        return {f"{name}.weight": self.weight}


Norm: TypeAlias = RmsNorm
