"""Plain rounding of weights to the forms of `--quantization`, made without the code under test."""

from collections.abc import Callable

import torch
from torch import Tensor

from penstock.kernels.linear.quantize_weights import WeightForm

GROUP = 32


def int8_rounded(weight: Tensor) -> Tensor:
    scales = weight.abs().amax(1, keepdim=True).clamp_min(1e-37) / 127
    return torch.round(weight / scales) * scales


def fp8_rounded(weight: Tensor) -> Tensor:
    scales = weight.abs().amax(1, keepdim=True).clamp_min(1e-37) / 448
    return (weight / scales).to(torch.float8_e4m3fn).float() * scales


def int4_rounded(weight: Tensor) -> Tensor:
    """Round each group of 32 inputs to 16 evenly spaced levels over its range, including 0."""
    found = torch.empty_like(weight)
    for row in range(len(weight)):
        for first in range(0, weight.shape[1], GROUP):
            part = weight[row, first : first + GROUP]
            low, high = min(float(part.min()), 0.0), max(float(part.max()), 0.0)
            if low == high:
                found[row, first : first + GROUP] = 0
                continue
            scale = (torch.tensor(high) - torch.tensor(low)) / 15
            zero = torch.round(-torch.tensor(low) / scale)
            levels = torch.clamp(torch.round(part / scale) + zero, 0, 15)
            found[row, first : first + GROUP] = (levels - zero) * scale
    return found


ROUNDED: dict[WeightForm, Callable[[Tensor], Tensor]] = {
    "int8": int8_rounded,
    "fp8": fp8_rounded,
    "int4": int4_rounded,
}
