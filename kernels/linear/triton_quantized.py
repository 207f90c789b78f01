"""Triton kernel of weight-only products, and its launcher; `quantized` describes the codes."""

import torch
from torch import Tensor

from penstock.kernels.triton_common.launch import jit, launch, tl

INT4, INT8, FP8 = 0, 1, 2
"""Kinds of codes, as in `cpu_dequantizing`."""


@jit
def _e4m3_to_float(code):
    """Convert e4m3 codes (int32) to float32; subnormal numbers are multiples of 2^-9."""
    rest = code & 0x7F
    value = ((rest << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(rest < 8, rest.to(tl.float32) * 0.001953125, value)
    value = tl.where(rest == 0x7F, float("nan"), value)
    return tl.where(code >= 0x80, -value, value)


@jit(unspecialized=("num_rows",))
def _dequantizing_matmul_kernel(
    x,  # [T, K] with strides x_row, 1
    codes,  # [N, K] uint8, INT4: [N, K / 2]
    scales,  # [N, G] float32
    zeros,  # [N, G] uint8; not read for FP8
    groups,  # [K] int32
    bias,  # [N]; not read without HAS_BIAS
    out,  # [T, N]
    num_rows,
    num_outputs,
    num_inputs,
    num_groups,
    x_row,
    KIND: tl.constexpr,
    ONE_GROUP: tl.constexpr,  # all inputs of a tile are in one group
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """Compute one tile of y; codes are converted in the main loop. Grid: (output, row tiles)."""
    outputs = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    rows = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    has_row, has_output = rows[:, None] < num_rows, outputs[:, None] < num_outputs
    x_rows = x + rows.to(tl.int64)[:, None] * x_row
    output_groups = outputs.to(tl.int64)[:, None] * num_groups
    acc = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.float32)
    # The groups of a tile are loaded one iteration ahead. Scales and zeros whose addresses the same
    # iteration loads could not be copied ahead of their use.
    in_tile = tl.arange(0, TILE_INPUTS)
    if ONE_GROUP:
        next_group = tl.load(groups)
    else:
        next_group = tl.load(groups + in_tile, mask=in_tile < num_inputs, other=0)
    for start in range(0, num_inputs, TILE_INPUTS):
        inputs = start + in_tile
        has_input = inputs[None, :] < num_inputs
        left = tl.load(x_rows + inputs[None, :], mask=has_row & has_input, other=0.0)
        if KIND == 0:
            width = num_inputs // 2
            pairs = start // 2 + tl.arange(0, TILE_INPUTS // 2)
            at = codes + outputs.to(tl.int64)[:, None] * width + pairs[None, :]
            both = tl.load(at, mask=has_output & (pairs[None, :] < width), other=0)
            code = tl.interleave(both & 15, both >> 4).to(tl.int32)
        else:
            at = codes + outputs.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
            code = tl.load(at, mask=has_output & has_input, other=0).to(tl.int32)
        following = start + TILE_INPUTS
        if ONE_GROUP:
            at = output_groups + next_group
            inside = has_output
            next_group = tl.load(groups + following, mask=following < num_inputs, other=0)
        else:
            at = output_groups + next_group[None, :]
            inside = has_output & has_input
            following += in_tile
            next_group = tl.load(groups + following, mask=following < num_inputs, other=0)
        if KIND == 2:
            value = _e4m3_to_float(code)
        else:
            zero = tl.load(zeros + at, mask=inside, other=0).to(tl.int32)
            value = (code - zero).to(tl.float32)
        scale = tl.load(scales + at, mask=inside, other=0.0)
        right = tl.trans((value * scale).to(left.dtype))
        acc = tl.dot(left, right, acc, input_precision="ieee")
    if HAS_BIAS:
        added = tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0)
        acc += added.to(tl.float32)[None, :]
    into = out + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(into, acc.to(out.dtype.element_ty), mask=has_row & (outputs[None, :] < num_outputs))


TILE_INPUTS = 64
_FEW_ROWS, _MANY_ROWS = 16, 64
_TILE_OUTPUTS = 64


def quantized_matmul_triton(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    bias: Tensor | None,
    kind: int,
    one_group: bool,
) -> Tensor:
    """Return x Wᵀ + b [T, N]; see `quantized.quantized_matmul`, which checks the arguments."""
    num_rows, num_outputs = len(x), len(codes)
    out = x.new_empty(num_rows, num_outputs)
    if not out.numel():
        return out
    tile_rows = _FEW_ROWS if num_rows <= _FEW_ROWS else _MANY_ROWS
    launch(
        _dequantizing_matmul_kernel,
        (-(-num_outputs // _TILE_OUTPUTS), -(-num_rows // tile_rows)),
        x,
        codes,
        scales,
        zeros if zeros.shape[1] else codes,
        groups,
        scales if bias is None else bias,
        out,
        num_rows,
        num_outputs,
        len(groups),
        scales.shape[1],
        x.stride(0),
        KIND=kind,
        ONE_GROUP=one_group,
        HAS_BIAS=bias is not None,
        TILE_ROWS=tile_rows,
        TILE_OUTPUTS=_TILE_OUTPUTS,
        # A tile of float32, or with a group for each input, of twice the size would spill.
        TILE_INPUTS=TILE_INPUTS if one_group and x.dtype != torch.float32 else TILE_INPUTS // 2,
        num_warps=4,
        num_stages=2 if x.dtype == torch.float32 else 3,
    )
    return out
