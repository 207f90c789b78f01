"""Quantization of float weights by rounding, without calibration data.

| form | codes | scales | zero points |
| --- | --- | --- | --- |
| int8 | -127 to 127 | one per output: largest magnitude / 127 | none |
| fp8 | e4m3, largest 448 | one per output: largest magnitude / 448 | none |
| int4 | 0 to 15 | one per group of 32 inputs: range / 15 | one per group |

The range of a group always contains 0, so that zero weights stay exactly zero.
"""

from typing import Literal, get_args

import torch
from torch import Tensor

from penstock.kernels.linear.quantized import Kind, QuantizedMatrix, even_groups

WeightForm = Literal["int8", "fp8", "int4"]

WEIGHT_FORMS: tuple[WeightForm, ...] = get_args(WeightForm)

GROUP_INPUTS = 32
"""Number of inputs per group of `int4`. The last group of a row may have fewer inputs."""

_ROWS_AT_ONCE = 256  # limits the memory of temporary float copies

_E4M3_MAX = 448.0


def quantize_weight(weight: Tensor, form: WeightForm) -> QuantizedMatrix:
    """Quantize a float matrix [N, K]; for `int4`, K must be even.

    A row that contains an infinity or NaN gets NaN weights in the affected groups.
    """
    num_outputs, num_inputs = weight.shape
    size = GROUP_INPUTS if form == "int4" else num_inputs
    width = num_inputs // 2 if form == "int4" else num_inputs
    groups = even_groups(num_inputs, size, weight.device)
    num_groups = -(-num_inputs // size)
    kind: Kind = form
    codes = torch.empty(num_outputs, width, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(num_outputs, num_groups, device=weight.device)
    zeros = torch.empty(
        num_outputs, 0 if form == "fp8" else num_groups, dtype=torch.uint8, device=weight.device
    )
    for first in range(0, num_outputs, _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        part = weight[rows].to(torch.float32)
        if form == "int4":
            codes[rows], scales[rows], zeros[rows] = _int4_rows(part)
            continue
        limit = 127 if form == "int8" else _E4M3_MAX
        scales[rows] = _row_scales(part, limit)
        levels = (part / scales[rows]).clamp_(-limit, limit)
        if form == "int8":
            codes[rows] = levels.round_().to(torch.int8).view(torch.uint8) ^ 128
            zeros[rows] = 128
        else:
            codes[rows] = levels.to(torch.float8_e4m3fn).view(torch.uint8)
    return QuantizedMatrix(kind, codes, scales, zeros, groups)


def _row_scales(part: Tensor, limit: float) -> Tensor:
    """Return one scale per row, [R, 1].

    The largest magnitude of a row divided by the scale is `limit`, the largest code.
    """
    return part.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / limit


def _int4_rows(part: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize float32 rows [R, K] to `int4`.

    Returns:
        Codes [R, K / 2], scales [R, G] and zero points [R, G], with G groups of inputs.
    """
    num_inputs = part.shape[1]
    grouped = torch.nn.functional.pad(part, (0, -num_inputs % GROUP_INPUTS))
    grouped = grouped.view(len(part), -1, GROUP_INPUTS)
    low, high = grouped.amin(2).clamp_max_(0), grouped.amax(2).clamp_min_(0)
    scales = ((high - low) / 15).clamp_min_(torch.finfo(torch.float32).tiny)
    zeros = (-low / scales).round_().clamp_(0, 15)
    levels = (grouped / scales[:, :, None]).round_().add_(zeros[:, :, None]).clamp_(0, 15)
    codes = levels.view(len(part), -1)[:, :num_inputs].nan_to_num_(0).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scales, zeros.nan_to_num_(0).to(torch.uint8)
