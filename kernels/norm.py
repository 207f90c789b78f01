"""Normalisation over the last dimension: RMS (Zhang and Sennrich, 2019), layer (Ba et al., 2016).

RMS:    y = x / sqrt(mean(x²) + eps) * weight
layer:  y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
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


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x [..., D], weight and bias [D], one floating dtype; a new tensor like x."""
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """What `layer_norm` means: mean and variance in float32, whatever the dtype of x."""
    wide = x.to(torch.float32)
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * scale * weight.float() + bias.float()).to(x.dtype)
