"""Quantizes weight matrices to published forms, by plain rounding or with calibration.

The sources are Frantar et al., "GPTQ" (2022), Lin et al., "AWQ" (2023), Dettmers et al., "QLoRA"
(2023) for NF4, the OCP Microscaling Formats specification 1.0 for MXFP4, and the block layouts of
ggml-common.h for Q4_K and Q6_K.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.linear.code_tables import E2M1, NF4
from penstock.workers.weights.gguf.dequantize import dequantize

GROUP = 128
"""Inputs per group of GPTQ and AWQ."""

NF4_BLOCK, MXFP4_BLOCK, NVFP4_BLOCK = 64, 32, 16

DAMPING = 0.01
"""GPTQ adds this fraction of the diagonal's mean to every element of the Hessian's diagonal."""

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Fractions of a group's range to which AWQ tries to clip the group."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """A quantized matrix [N, K].

    Attributes:
        weight: the dequantized weights.
        half_steps: half the distance between the two quantization levels around each weight.
        codes: unsigned codes, in the layout of the form.
        scales: scales of the groups.
        zeros: zero points of the groups; for NVFP4, the factor [1] of all scales.
    """

    weight: Tensor
    half_steps: Tensor
    codes: Tensor
    scales: Tensor
    zeros: Tensor


def group_levels(part: Tensor, fraction: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return scales and zero points [N] of 16 levels that cover `fraction` of each row's range.

    The scales are rounded to float16.
    """
    low, high = part.amin(1).clamp_max(0) * fraction, part.amax(1).clamp_min(0) * fraction
    scales = ((high - low) / 15).clamp_min(1e-6).half().to(part.dtype)
    return scales, (-low / scales).round().clamp(0, 15)


def to_levels(values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    return (values / scales).round().add(zeros).clamp(0, 15)


def gptq(weight: Tensor, hessian: Tensor) -> Rounded:
    """Quantize one column after the other, with the method GPTQ.

    The rounding error of a column is compensated by changes to the later columns.
    """
    work, hessian = weight.double(), hessian.double().clone()
    size = work.shape[1]
    unused = hessian.diagonal() == 0
    hessian[unused, unused] = 1
    hessian.diagonal().add_(DAMPING * hessian.diagonal().mean())
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    codes, errors = torch.zeros_like(work), torch.zeros_like(work)
    scales, zeros = [], []
    for first in range(0, size, GROUP):
        last = min(first + GROUP, size)
        scale, zero = group_levels(work[:, first:last])
        scales.append(scale)
        zeros.append(zero)
        for column in range(first, last):
            codes[:, column] = to_levels(work[:, column], scale, zero)
            error = work[:, column] - (codes[:, column] - zero) * scale
            errors[:, column] = error / inverse[column, column]
            rest = slice(column + 1, last)
            work[:, rest] -= errors[:, column, None] * inverse[column, rest]
        work[:, last:] -= errors[:, first:last] @ inverse[first:last, last:]
    return of_groups(codes, torch.stack(scales, 1), torch.stack(zeros, 1))


def clipped(weight: Tensor, importance: Tensor) -> Rounded:
    """Round each group after clipping it to a fraction of its range.

    Each group gets the fraction with the smallest weighted error.

    Args:
        importance: [K] weight of each input's squared error.
    """
    grouped, cost = weight.double().view(-1, GROUP), importance.double().view(-1, GROUP)
    cost = cost.repeat(len(weight), 1)
    best = torch.full((len(grouped),), torch.inf, dtype=torch.float64)
    scales, zeros = group_levels(grouped)
    for fraction in CLIPS:
        scale, zero = group_levels(grouped, fraction)
        levels = to_levels(grouped, scale[:, None], zero[:, None])
        errors = ((levels - zero[:, None]) * scale[:, None] - grouped).square().mul(cost).sum(1)
        better = errors < best
        best = torch.where(better, errors, best)
        scales, zeros = torch.where(better, scale, scales), torch.where(better, zero, zeros)
    codes = to_levels(grouped, scales[:, None], zeros[:, None]).view(weight.shape)
    return of_groups(codes, scales.view(len(weight), -1), zeros.view(len(weight), -1))


def of_groups(codes: Tensor, scales: Tensor, zeros: Tensor) -> Rounded:
    wide, zero = (each.repeat_interleave(GROUP, 1) for each in (scales, zeros))
    return Rounded(((codes - zero) * wide).float(), wide.float() / 2, codes, scales, zeros)


def nf4(weight: Tensor) -> Rounded:
    """Round to the nearest of the 16 NF4 values, scaled by the largest magnitude of each block."""
    blocks = weight.view(-1, NF4_BLOCK)
    scales = blocks.abs().amax(1)
    values = torch.tensor(NF4)
    codes = (blocks[..., None] / scales[:, None, None] - values).abs().argmin(-1)
    gaps = torch.cat([values.diff(), values.diff()[-1:]])
    steps = gaps[codes] * scales[:, None] / 2
    found = values[codes] * scales[:, None]
    return Rounded(found.view_as(weight), steps.view_as(weight), codes, scales, scales)


def mxfp4(weight: Tensor) -> Rounded:
    """Round blocks of 32 to the values of e2m1. The scales are powers of two."""
    blocks = weight.view(-1, MXFP4_BLOCK)
    exponents = blocks.abs().amax(1).clamp_min(2.0**-100).log2().floor() - 2
    codes, found, steps = _to_e2m1(blocks, exponents.exp2())
    scales = (exponents + 127).to(torch.uint8).view(len(weight), -1)
    shape = weight.shape
    return Rounded(found.view(shape), steps.view(shape), codes.view(shape), scales, scales)


def nvfp4(weight: Tensor) -> Rounded:
    """Round blocks of 16 to the values of e2m1.

    The scales are e4m3 numbers, which are multiplied by one factor for the whole matrix.
    """
    blocks = weight.view(-1, NVFP4_BLOCK)
    largest = blocks.abs().amax(1)
    factor = largest.amax() / (6 * 448)
    scales = (largest / 6 / factor).to(torch.float8_e4m3fn)
    codes, found, steps = _to_e2m1(blocks, scales.float() * factor)
    shape = weight.shape
    wide = scales.view(len(weight), -1)
    return Rounded(found.view(shape), steps.view(shape), codes.view(shape), wide, factor.view(1))


def _to_e2m1(blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round `blocks` [B, size], with one scale per block, to the values of e2m1.

    Returns:
        The codes, the dequantized values and the half steps (see `Rounded`), each [B, size].
    """
    magnitudes = torch.tensor(E2M1[:8])
    scaled = blocks / scales[:, None].clamp_min(2.0**-126)
    codes = (scaled.abs()[..., None] - magnitudes).abs().argmin(-1)
    gaps = torch.cat([magnitudes.diff(), magnitudes.diff()[-1:]])
    found = (magnitudes[codes] * scales[:, None]).copysign(blocks)
    return codes + 8 * (blocks < 0), found, gaps[codes] * scales[:, None] / 2


def q4_k(weight: Tensor) -> Rounded:
    """Round to blocks of Q4_K: 8 groups of 32 with scales and minima of 6 bits."""
    grouped = weight.view(-1, 8, 32)
    low, high = grouped.amin(2).clamp_max(0), grouped.amax(2).clamp_min(0)
    scale, least = (high - low) / 15, -low
    d, dmin = _half(scale.amax(1) / 63), _half(least.amax(1) / 63)
    scales, minima = (
        (part / whole[:, None].float()).nan_to_num(0).round().clamp(0, 63).to(torch.uint8)
        for part, whole in ((scale, d), (least, dmin))
    )
    step = d[:, None].float() * scales
    offset = dmin[:, None].float() * minima
    codes = ((grouped + offset[..., None]) / step[..., None]).nan_to_num(0).round().clamp(0, 15)
    packed = codes.to(torch.uint8).view(-1, 4, 2, 32)
    lower = [part[:, :4] | ((part[:, 4:] >> 4) << 6) for part in (scales, minima)]
    both = (scales[:, 4:] & 15) | ((minima[:, 4:] & 15) << 4)
    blocks = torch.cat([_bytes(d), _bytes(dmin), *lower, both,
                        (packed[:, :, 0] | (packed[:, :, 1] << 4)).flatten(1)], 1)  # fmt: skip
    return _of_blocks(weight, blocks, "Q4_K", step[..., None].expand(-1, -1, 32))


def q6_k(weight: Tensor) -> Rounded:
    """Round to blocks of Q6_K: 16 groups of 16 with int8 scales."""
    grouped = weight.view(-1, 16, 16)
    scale = grouped.abs().amax(2) / 31
    d = _half(scale.amax(1) / 127)
    scales = (scale / d[:, None].float()).nan_to_num(0).round().clamp(0, 127)
    step = d[:, None].float() * scales
    codes = (grouped / step[..., None]).nan_to_num(0).round().clamp(-32, 31) + 32
    flat = codes.to(torch.uint8)
    low, high = (flat & 15).view(-1, 2, 2, 64), (flat >> 4).view(-1, 2, 4, 32)
    top = sum(high[:, :, at] << 2 * at for at in range(4))
    assert isinstance(top, Tensor)
    blocks = torch.cat([(low[:, :, 0] | (low[:, :, 1] << 4)).flatten(1), top.flatten(1),
                        scales.to(torch.int8).view(torch.uint8), _bytes(d)], 1)  # fmt: skip
    return _of_blocks(weight, blocks, "Q6_K", step[..., None].expand(-1, -1, 16))


def _half(values: Tensor) -> Tensor:
    return values.half()


def _bytes(values: Tensor) -> Tensor:
    return values[:, None].contiguous().view(torch.uint8)


def _of_blocks(weight: Tensor, blocks: Tensor, kind: str, steps: Tensor) -> Rounded:
    found = dequantize(blocks, kind).view_as(weight)
    half_steps = steps.reshape(weight.shape) / 2
    return Rounded(found, half_steps, blocks, blocks, blocks)
