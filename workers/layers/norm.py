"""Normalisations with their weights."""

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from penstock.kernels.norm import layer_norm, rms_norm, rms_norm_above_one


@dataclass(frozen=True, slots=True)
class RmsNorm:
    weight: Tensor  # [D]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Where its weights go, by their names in the checkpoint."""
        return {f"{name}.weight": self.weight}


@dataclass(frozen=True, slots=True)
class RmsNormAboveOne:
    """Its weight counts from one."""

    weight: Tensor  # [D]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm_above_one(x, self.weight, self.eps)

    def tensors(self, name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": self.weight}


@dataclass(frozen=True, slots=True)
class LayerNorm:
    weight: Tensor  # [D]
    bias: Tensor  # [D]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def tensors(self, name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": self.weight, f"{name}.bias": self.bias}


Norm: TypeAlias = RmsNorm | RmsNormAboveOne | LayerNorm
