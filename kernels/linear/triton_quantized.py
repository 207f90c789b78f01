"""Triton kernel of weight-only products, and its launcher; `quantized` describes the codes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.triton_common.launch import device_info, jit, launch, tl
from penstock.kernels.triton_common.tuned_tiles import tuned_tiles

INT4, INT8, FP8, E2M1, NF4, FP4 = range(6)
"""Kinds of codes, as in `cpu_dequantizing`."""


@jit
def _e4m3_to_float(code):
    """Convert e4m3 codes (int32) to float32; subnormal numbers are multiples of 2^-9."""
    rest = code & 0x7F
    value = ((rest << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(rest < 8, rest.to(tl.float32) * 0.001953125, value)
    value = tl.where(rest == 0x7F, float("nan"), value)
    return tl.where(code >= 0x80, -value, value)


@jit
def _e2m1_to_float(code):
    """Convert e2m1 codes (int32, 0 to 15) to float32; the only subnormal number is 0.5."""
    rest = code & 7
    value = ((rest << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(rest < 2, rest.to(tl.float32) * 0.5, value)
    return tl.where(code >= 8, -value, value)


@jit
def _nf4_to_float(code):
    """Convert NF4 codes (int32, 0 to 15) to float32 by a binary search for the value."""
    low = tl.where(
        code < 4,
        tl.where(
            code < 2,
            tl.where(code < 1, -1.0, -0.6961928009986877),
            tl.where(code < 3, -0.5250730514526367, -0.39491748809814453),
        ),
        tl.where(
            code < 6,
            tl.where(code < 5, -0.28444138169288635, -0.18477343022823334),
            tl.where(code < 7, -0.09105003625154495, 0.0),
        ),
    )
    high = tl.where(
        code < 12,
        tl.where(
            code < 10,
            tl.where(code < 9, 0.07958029955625534, 0.16093020141124725),
            tl.where(code < 11, 0.24611230194568634, 0.33791524171829224),
        ),
        tl.where(
            code < 14,
            tl.where(code < 13, 0.44070982933044434, 0.5626170039176941),
            tl.where(code < 15, 0.7229568362236023, 1.0),
        ),
    )
    return tl.where(code < 8, low, high)


@jit
def _fp4_to_float(code):
    """Convert FP4 codes of bitsandbytes (int32, 0 to 15) to float32."""
    rest = code & 7
    low = tl.where(
        rest < 2,
        tl.where(rest < 1, 0.0, 0.005208333333333333),
        tl.where(rest < 3, 0.6666666666666666, 1.0),
    )
    high = tl.where(
        rest < 6,
        tl.where(rest < 5, 0.3333333333333333, 0.5),
        tl.where(rest < 7, 0.16666666666666666, 0.25),
    )
    value = tl.where(rest < 4, low, high)
    return tl.where(code >= 8, -value, value)


@jit(unspecialized=("num_rows",))
def _dequantizing_matmul_kernel(
    x,  # [T, K] with strides x_row, 1: T rows of K inputs
    codes,  # [N, K] uint8 codes of N outputs; [N, K / 2] for codes of 4 bits
    scales,  # [N, G] float32 scales of the G groups of inputs
    zeros,  # [N, G] uint8 zero points; read only for INT4 and INT8
    groups,  # [K] int32 group of each input
    bias,  # [N]; read only with HAS_BIAS
    out,  # [T, N]
    num_rows,
    num_outputs,
    num_inputs,
    num_groups,
    x_row,
    KIND: tl.constexpr,
    ONE_GROUP: tl.constexpr,  # True if all inputs of each tile are in one group
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """Compute one tile of y, and convert the codes in the main loop.

    The grid is (output tiles, row tiles).
    """
    outputs = tl.program_id(0) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    rows = tl.program_id(1) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    has_row, has_output = rows[:, None] < num_rows, outputs[:, None] < num_outputs
    x_rows = x + rows.to(tl.int64)[:, None] * x_row
    output_groups = outputs.to(tl.int64)[:, None] * num_groups
    acc = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.float32)
    # Load the group numbers of a tile one iteration early. Triton prefetches scales only if no load
    # in the same iteration computes the addresses of the scales.
    in_tile = tl.arange(0, TILE_INPUTS)
    if ONE_GROUP:
        next_group = tl.load(groups)
    else:
        next_group = tl.load(groups + in_tile, mask=in_tile < num_inputs, other=0)
    for start in range(0, num_inputs, TILE_INPUTS):
        inputs = start + in_tile
        has_input = inputs[None, :] < num_inputs
        left = tl.load(x_rows + inputs[None, :], mask=has_row & has_input, other=0.0)
        if KIND != 1 and KIND != 2:
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
        elif KIND == 3:
            value = _e2m1_to_float(code)
        elif KIND == 4:
            value = _nf4_to_float(code)
        elif KIND == 5:
            value = _fp4_to_float(code)
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
"""Maximum number of inputs of a tile; `quantized` checks groups for tiles of this size."""


@dataclass(frozen=True, slots=True)
class Tiles:
    rows: int
    outputs: int
    inputs: int  # inputs per tile, at most TILE_INPUTS
    num_warps: int
    num_stages: int


FEW_ROWS, MANY_ROWS = 16, 64


def tiles_for(dtype: torch.dtype, num_rows: int, one_group: bool) -> Tiles:
    """Return the tile sizes for a product of `num_rows` rows."""
    is_wide = dtype == torch.float32
    return Tiles(
        rows=FEW_ROWS if num_rows <= FEW_ROWS else MANY_ROWS,
        outputs=64,
        # Larger tiles would spill registers for float32, and for inputs of several groups per tile.
        inputs=TILE_INPUTS if one_group and not is_wide else TILE_INPUTS // 2,
        num_warps=4,
        num_stages=2 if is_wide else 3,
    )


def tuned_for(x: Tensor, kind: int, one_group: bool, tiles: Tiles) -> Tiles:
    """Return the tiles that were tuned for this device, or `tiles` if none were tuned.

    Args:
        x: the input of the layer.
        kind: the kind of codes.
        one_group: see `quantized.quantized_matmul`.
        tiles: the result of `tiles_for`.
    """
    tuned = tuned_tiles(
        device_info(x).product,
        "linear.weight_only",
        kind=kind,
        one_group=int(one_group),
        rows=tiles.rows,
        itemsize=x.itemsize,
    )
    return tiles if tuned is None else Tiles(**tuned)


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
    tiles = tuned_for(x, kind, one_group, tiles_for(x.dtype, num_rows, one_group))
    launch(
        _dequantizing_matmul_kernel,
        (-(-num_outputs // tiles.outputs), -(-num_rows // tiles.rows)),
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
        TILE_ROWS=tiles.rows,
        TILE_OUTPUTS=tiles.outputs,
        TILE_INPUTS=tiles.inputs,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out
