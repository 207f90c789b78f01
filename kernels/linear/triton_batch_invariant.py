"""Triton kernels of the batch-invariant matrix product, and their launcher.

`linear/batch_invariant` describes the order of summation.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.triton_common.launch import DeviceInfo, device_info, jit, launch, tl


@jit(unspecialized=("num_rows", "slices_each"))
def _matmul_kernel(
    x,  # [T, H, K] with strides x_row, x_head, 1: T rows, H heads, K inputs
    weight,  # [H, N, K] with stride 1 along N (outputs) or along K (inputs)
    bias,  # [N]; read only with HAS_BIAS, which requires H = 1
    out,  # [T, H, N], or [slices, T, H, N] float32 if each slice has its own program
    num_rows,
    num_outputs,
    num_inputs,
    x_row,
    x_head,
    weight_head,
    weight_output,
    weight_input,
    slice_size,  # number of inputs per slice, a multiple of TILE_INPUTS
    slices_each,  # number of slices that a program computes: 1, or all slices
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    # number of row tiles whose programs run consecutively, to reuse weights in the L2 cache
    BAND: tl.constexpr,
):
    """Compute one tile of y for one head, from one slice or from all slices of the inputs.

    The grid is (row tiles * output tiles, slices, H). If a program computes all slices, the second
    size is 1.
    """
    row_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    output_tiles = (num_outputs + TILE_OUTPUTS - 1) // TILE_OUTPUTS
    tile, first_slice = tl.program_id(0), tl.program_id(1) * slices_each
    head, num_heads = tl.program_id(2).to(tl.int64), tl.num_programs(2)
    band = tile // (BAND * output_tiles)
    band_rows = tl.minimum(row_tiles - band * BAND, BAND)
    band_tile = tile % (BAND * output_tiles)
    rows = (band * BAND + band_tile % band_rows) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    outputs = (band_tile // band_rows) * TILE_OUTPUTS + tl.arange(0, TILE_OUTPUTS)
    x_rows = x + head * x_head + rows.to(tl.int64)[:, None] * x_row
    weight_rows = weight + head * weight_head + outputs.to(tl.int64)[None, :] * weight_output
    has_row, has_output = rows[:, None] < num_rows, outputs[None, :] < num_outputs

    total = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.float32)
    for number in range(first_slice, first_slice + slices_each):
        acc = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.float32)
        for start in range(0, slice_size, TILE_INPUTS):
            inputs = number * slice_size + start + tl.arange(0, TILE_INPUTS)
            left = tl.load(
                x_rows + inputs[None, :],
                mask=has_row & (inputs[None, :] < num_inputs),
                other=0.0,
            )
            right = tl.load(
                weight_rows + inputs[:, None] * weight_input,
                mask=has_output & (inputs[:, None] < num_inputs),
                other=0.0,
            )
            acc = tl.dot(left, right, acc, input_precision="ieee")
        total += acc
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)
    at = ((tl.program_id(1) * num_rows + rows) * num_heads + head)[:, None] * num_outputs + outputs
    tl.store(out + at, total.to(out.dtype.element_ty), mask=has_row & has_output)


@jit(unspecialized=("num_slices",))
def _add_slices_kernel(
    slices,  # [slices, size] float32 results of `_matmul_kernel`
    bias,  # [N]; read only with HAS_BIAS
    out,  # [size] result: y, flattened
    size,  # number of elements of y: T * H * N
    num_outputs,
    num_slices,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum the slices of `_matmul_kernel` in order, and add the bias.

    Each program computes TILE elements of y.
    """
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < size
    total = tl.zeros((TILE,), tl.float32)
    for number in range(num_slices):
        total += tl.load(slices + number * size + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


PROGRAMS = 264
"""Number of programs that is assumed to keep every GPU busy: two per SM of an H100. The number is a
constant, so that the slices, and with them the order of summation, do not depend on the GPU's
number of SMs."""

MIN_SLICE = 512  # smallest number of inputs per slice
MAX_SLICES = 16
ELEMENTS_PER_PROGRAM = 1024  # number of elements of y per program of `_add_slices_kernel`
BAND_ROW_TILES = 8  # value of BAND in `_matmul_kernel`


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes and launch options of `_matmul_kernel`."""

    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


# for float32, whose products do not use tensor cores
WIDE = Tiles(64, 64, 32, num_warps=4, num_stages=3)
# for 16-bit dtypes; needs 96 KiB of shared memory
HALF = Tiles(128, 128, 64, num_warps=8, num_stages=3)
# for 16-bit dtypes on sm_80 to sm_89: small tiles, because these chips keep operands in registers
NARROW = Tiles(64, 64, 64, num_warps=4, num_stages=3)


def batch_invariant_bmm_triton(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x[:, h] weight[h]ᵀ + bias for each head h; `bias` must be None unless H is 1.

    x is [T, H, K], weight [H, N, K] and bias [N]; the result is [T, H, N].
    """
    (num_rows, num_heads, num_inputs), num_outputs = x.shape, weight.shape[1]
    out = x.new_empty(num_rows, num_heads, num_outputs)
    if not out.numel():
        return out
    tiles = WIDE if x.dtype == torch.float32 else _tile_sizes(device_info(x))
    slice_size, num_slices = slicing(num_outputs, num_inputs, tiles)
    num_tiles = -(-num_rows // tiles.rows) * -(-num_outputs // tiles.outputs)
    apart = num_slices > 1 and are_few(num_tiles * num_heads)
    sums = x.new_empty(num_slices, *out.shape, dtype=torch.float32) if apart else out
    launch(
        _matmul_kernel,
        (num_tiles, num_slices if apart else 1, num_heads),
        x,
        weight,
        weight if bias is None else bias,
        sums,
        num_rows,
        num_outputs,
        num_inputs,
        *x.stride()[:2],
        *weight.stride(),
        slice_size,
        1 if apart else num_slices,
        HAS_BIAS=bias is not None and not apart,
        TILE_ROWS=tiles.rows,
        TILE_OUTPUTS=tiles.outputs,
        TILE_INPUTS=tiles.inputs,
        BAND=BAND_ROW_TILES,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if apart:
        launch(
            _add_slices_kernel,
            (-(-out.numel() // ELEMENTS_PER_PROGRAM),),
            sums,
            weight if bias is None else bias,
            out,
            out.numel(),
            num_outputs,
            num_slices,
            HAS_BIAS=bias is not None,
            TILE=ELEMENTS_PER_PROGRAM,
        )
    return out


def _tile_sizes(chip: DeviceInfo) -> Tiles:
    return NARROW if chip.name in ("sm_80", "sm_86", "sm_89") else HALF


def are_few(num_tiles: int) -> bool:
    """Return whether `num_tiles` programs are too few to keep a GPU busy."""
    return num_tiles < PROGRAMS


def slicing(num_outputs: int, num_inputs: int, tiles: Tiles) -> tuple[int, int]:
    """Return the number of inputs per slice and the number of slices, for any number of rows.

    The two numbers depend on the tiles, and therefore on the generation of the GPU (`_tile_sizes`).
    GPUs of different generations would give different last bits in any case, because their tensor
    cores add the products of one instruction in different ways.
    """
    wanted = -(-PROGRAMS // -(-num_outputs // tiles.outputs))
    num_slices = max(min(wanted, num_inputs // MIN_SLICE, MAX_SLICES), 1)
    steps = -(-num_inputs // (num_slices * tiles.inputs))
    return steps * tiles.inputs, -(-num_inputs // (steps * tiles.inputs))
