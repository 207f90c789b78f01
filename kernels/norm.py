"""RMS normalisation over the last dimension (Zhang and Sennrich, 2019).

y = x / sqrt(mean(x²) + eps) * weight
"""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalises every row: x [..., D], weight [D], one floating dtype; a new tensor like x."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """What `rms_norm` means: the mean in float32, whatever the dtype of x."""
    wide = x.to(torch.float32)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def rms_norm_above_one(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """With a weight that counts from one (Gemma): y = x / sqrt(mean(x²) + eps) * (1 + weight).

    In float32 all through, whatever the dtype: 1 + weight would lose small weights.
    """
    wide = functional.rms_norm(x.float(), weight.shape, 1.0 + weight.float(), eps)
    return wide.to(x.dtype)
