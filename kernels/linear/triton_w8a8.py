"""Triton kernels of products of quantized activations (W8A8), and their launchers; see `w8a8`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.kv_cache.triton_codes import largest_bits, to_codes
from penstock.kernels.linear.code_kinds import FP8_GROUP_INPUTS
from penstock.kernels.triton_common.launch import DeviceInfo, device_info, jit, launch, tl


@jit
def _quantize_kernel(
    x,  # [T, K] with strides x_row, 1: T rows of K inputs
    codes,  # [T, K] result: int8, float8_e4m3fn, or uint8 for the bits of float8_e4m3fn
    scales,  # [T, G] float32 result, one scale per group
    num_inputs,
    num_groups,
    x_row,
    group_size,  # number of inputs per group; a multiple of TILE if there are several groups
    limit,  # largest magnitude with a static scale; 0.0: the largest magnitude of each group
    MOST: tl.constexpr,  # largest magnitude of a code: 127 (INT8) or 448 (FP8)
    MIN_LARGEST: tl.constexpr,  # lower bound for the largest magnitude of a group
    GROUPS: tl.constexpr,  # number of groups per program
    TILE: tl.constexpr,  # number of inputs of a group that are loaded at once
):
    """Quantize some groups of one row.

    The grid is (T, number of groups / GROUPS, rounded up). The codes of a group of several tiles
    are computed in a second pass over the inputs, which the first pass has left in a cache.
    """
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)[:, None]
    columns = tl.arange(0, TILE)[None, :]
    largest = tl.zeros((GROUPS, 1), tl.int32)
    for start in range(0, group_size, TILE):
        inputs = groups * group_size + start + columns
        values = tl.load(x + row * x_row + inputs, mask=inputs < num_inputs, other=0.0)
        largest = tl.maximum(largest, largest_bits(values))
    most = largest.to(tl.float32, bitcast=True)
    most = tl.where(most < MIN_LARGEST, MIN_LARGEST, most)  # keeps NaN
    # A scale of NaN or Inf propagates the error, so the static scale does not replace it.
    most = tl.where((limit > 0) & (most < float("inf")), limit, most)
    step = tl.div_rn(tl.full((GROUPS, 1), MOST, tl.float32), most)
    scale = tl.div_rn(most, tl.full((GROUPS, 1), MOST, tl.float32))
    tl.store(scales + row * num_groups + groups, scale, mask=groups < num_groups)
    for start in range(0, group_size, TILE):
        inputs = groups * group_size + start + columns
        inside = inputs < num_inputs
        values = tl.load(x + row * x_row + inputs, mask=inside, other=0.0)
        found = to_codes(values, step, codes.dtype.element_ty, MOST)
        tl.store(codes + row * num_inputs + inputs, found, mask=inside)


@jit(unspecialized=("num_rows",))
def _w8a8_matmul_kernel(
    x,  # [T, K] int8 or float8_e4m3fn codes: T rows of K inputs
    x_scales,  # [T, G] float32
    weight,  # [N, K] codes of N outputs; dtype of x
    weight_scales,  # [G, N] float32
    bias,  # [N]; read only with HAS_BIAS
    out,  # [T, N]
    num_rows,
    num_outputs,
    num_inputs,
    num_groups,  # G: 1, or the number of tiles of the inputs
    HAS_GROUPS: tl.constexpr,  # True if each tile of the inputs has its own scales; only for FP8
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    # number of row tiles whose programs run consecutively, to reuse weights in the L2 cache
    BAND: tl.constexpr,
):
    """Compute one tile of y. The grid is (row tiles * output tiles).

    INT8 products are summed exactly, in int32. FP8 products are summed by the tensor cores for one
    tile of inputs at a time, and the sums of tiles are added in float32, in the order of the
    inputs. The tensor cores of Hopper keep only about 14 bits of a sum (DeepSeek-V3 technical
    report, 3.3.2), so longer sums would lose accuracy.
    """
    row_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    output_tiles = (num_outputs + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    tile = tl.program_id(0)
    band = tile // (BAND * output_tiles)
    band_rows = tl.minimum(row_tiles - band * BAND, BAND)
    band_tile = tile % (BAND * output_tiles)
    rows = (band * BAND + band_tile % band_rows) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    outputs = (band_tile // band_rows) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    has_row, has_output = rows < num_rows, outputs < num_outputs
    x_rows = x + rows.to(tl.int64)[:, None] * num_inputs
    weight_rows = weight + outputs.to(tl.int64)[None, :] * num_inputs
    row_groups = x_scales + rows.to(tl.int64) * num_groups

    IS_INT8: tl.constexpr = x.dtype.element_ty == tl.int8
    acc = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.int32 if IS_INT8 else tl.float32)
    for number in range(0, (num_inputs + TILE_INPUTS - 1) // TILE_INPUTS):
        inputs = number * TILE_INPUTS + tl.arange(0, TILE_INPUTS)
        has_input = inputs < num_inputs
        left = tl.load(
            x_rows + inputs[None, :], mask=has_row[:, None] & has_input[None, :], other=0.0
        )
        right = tl.load(
            weight_rows + inputs[:, None], mask=has_input[:, None] & has_output[None, :], other=0.0
        )
        if IS_INT8:
            acc = tl.dot(left, right, acc, out_dtype=tl.int32)
        else:
            # With 0, the compiler would continue the sum in the tensor cores.
            part = tl.dot(left, right, max_num_imprecise_acc=TILE_INPUTS)
            if HAS_GROUPS:
                row_scale = tl.load(row_groups + number, mask=has_row, other=0.0)
                at = weight_scales + number * num_outputs + outputs
                output_scale = tl.load(at, mask=has_output, other=0.0)
                part *= row_scale[:, None] * output_scale[None, :]
            acc += part
    total = acc.to(tl.float32)
    if not HAS_GROUPS:
        total *= tl.load(row_groups, mask=has_row, other=0.0)[:, None]
        total *= tl.load(weight_scales + outputs, mask=has_output, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=has_output, other=0.0).to(tl.float32)[None, :]
    into = out + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(into, total.to(out.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])


TILE_INPUTS = FP8_GROUP_INPUTS
"""Number of inputs of a tile, for every device and number of rows. With FP8, it determines the
order of sums."""

BAND_ROW_TILES = 8  # row tiles of a band: the argument BAND of `_w8a8_matmul_kernel`
ROW_TILE = 2048  # number of inputs that `_quantize_kernel` loads at once, if a row has one scale
GROUPS_PER_PROGRAM = 16  # number of groups that a program of `_quantize_kernel` quantizes


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes and launch options of `_w8a8_matmul_kernel`."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


def tiles_for(chip: DeviceInfo, is_fp8: bool, num_rows: int) -> Tiles:
    """Return the tile sizes for a product of `num_rows` rows.

    The tile sizes depend on the number of rows, but the result for a row does not: int8 sums are
    exact, and for FP8 all tiles of a device use one kind of tensor core instruction, with the same
    number of inputs per instruction.
    """
    if num_rows <= 16:
        # With 16 rows, Hopper would use other FP8 instructions than with 64 rows. A tile of 64 rows
        # takes no longer: the time of such products is the time to read the weights.
        needs_warpgroup = is_fp8 and chip.has_warpgroup_products
        return Tiles(64 if needs_warpgroup else 16, 32, num_warps=4, num_stages=5)
    if num_rows <= 64 or chip.shared_bytes < 128 << 10:
        return Tiles(64, 64, num_warps=4, num_stages=3)
    return Tiles(128, 128, num_warps=8, num_stages=3)


def quantize_activations_triton(
    x: Tensor, dtype: torch.dtype, group_size: int, most: float, min_largest: float, limit: float
) -> tuple[Tensor, Tensor]:
    """Return codes [T, K] and scales [T, G]; see `w8a8.quantize_activations`."""
    num_rows, num_inputs = x.shape
    num_groups = -(-num_inputs // group_size)
    codes = x.new_empty(num_rows, num_inputs, dtype=dtype)
    scales = x.new_empty(num_rows, num_groups, dtype=torch.float32)
    one = num_groups == 1
    # Triton's interpreter converts to float8_e4m3fn wrongly, so the kernel computes the bits there.
    soft = dtype == torch.float8_e4m3fn and not device_info(x).converts_e4m3
    groups = 1 if one else GROUPS_PER_PROGRAM
    launch(
        _quantize_kernel,
        (num_rows, -(-num_groups // groups)),
        x,
        codes.view(torch.uint8) if soft else codes,
        scales,
        num_inputs,
        num_groups,
        x.stride(0),
        num_inputs if one else group_size,
        limit,
        MOST=most,
        MIN_LARGEST=min_largest,
        GROUPS=groups,
        TILE=ROW_TILE if one else TILE_INPUTS,
        num_warps=4,
    )
    return codes, scales


def w8a8_matmul_triton(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Return y [T, N]; see `w8a8.w8a8_matmul`, which checks the arguments."""
    (num_rows, num_inputs), num_outputs = x.shape, len(weight)
    out = x.new_empty(num_rows, num_outputs, dtype=dtype)
    tiles = tiles_for(device_info(x), x.dtype == torch.float8_e4m3fn, num_rows)
    launch(
        _w8a8_matmul_kernel,
        (-(-num_rows // tiles.rows) * -(-num_outputs // tiles.outputs),),
        x,
        x_scales,
        weight,
        weight_scales,
        weight_scales if bias is None else bias,
        out,
        num_rows,
        num_outputs,
        num_inputs,
        x_scales.shape[1],
        HAS_GROUPS=x_scales.shape[1] > 1,
        HAS_BIAS=bias is not None,
        TILE_ROWS=tiles.rows,
        TILE_OUTPUTS=tiles.outputs,
        TILE_INPUTS=TILE_INPUTS,
        BAND=BAND_ROW_TILES,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out
