"""A matrix product whose rows know nothing of each other: y = x Wᵀ + b, bitwise.

A vendor's product picks its tiles, and with them the order of its sums, by the number of rows, so
that a row's last bits depend on its company. Here the order depends on the weights' shape alone:
the K inputs are cut into slices, a slice is summed in float32 from its first input to its last
by one tile, and slices are added in order. With few rows each slice has a program of its own, and a
second kernel adds them up; with many one program does them in turn. Both give the same bits.

x [T, K], weight [N, K], bias [N], one of float32, float16, bfloat16; y [T, N] likewise. float32 is
multiplied as float32 (never TF32). Heads that each have a weight of their own are as many such
products in one launch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.triton_common.aot import AotCase, meta
from penstock.kernels.triton_common.launch import (
    FLOATS,
    DeviceInfo,
    check,
    device_info,
    jit,
    launch,
    tl,
    use_triton,
)


@jit(unspecialized=("num_rows", "slices_each"))
def _matmul_kernel(
    x,  # [T, H, K] with strides x_row, x_head, 1
    weight,  # [H, N, K] with some strides, one of the last two 1
    bias,  # [N], of a single head; not read without HAS_BIAS
    out,  # [T, H, N], or [slices, T, H, N] float32 where there is a program a slice
    num_rows,
    num_outputs,
    num_inputs,
    x_row,
    x_head,
    weight_head,
    weight_output,
    weight_input,
    slice_size,  # a multiple of TILE_INPUTS
    slices_each,  # slices a program: 1 or all
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
    BAND: tl.constexpr,  # tiles of rows that share a tile of weights while it is in the L2 cache
):
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
def _add_slices(
    slices,  # [slices, T N] float32
    bias,  # [N]
    out,  # [T N]
    size,  # T N
    num_outputs,
    num_slices,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < size
    total = tl.zeros((TILE,), tl.float32)
    for number in range(num_slices):
        total += tl.load(slices + number * size + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + at % num_outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


PROGRAMS = 264
"""So many keep a device busy: two for each of an H100's processors. A constant, since no bit of a
result may depend on the device at hand either."""

MIN_SLICE = 512  # inputs
MAX_SLICES = 16
ELEMENTS_PER_PROGRAM = 1024  # elements a program of `_add_slices`
GROUP_ROWS = 8  # tiles of rows


@dataclass(frozen=True, slots=True)
class Tiles:
    rows: int
    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


WIDE = Tiles(64, 64, 32, num_warps=4, num_stages=3)  # float32, on no tensor core
HALF = Tiles(128, 128, 64, num_warps=8, num_stages=3)  # 96 KiB of shared memory
NARROW = Tiles(64, 64, 64, num_warps=4, num_stages=3)  # where registers hold the operands too


def batch_invariant_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] of one dtype on one GPU; [T, N].

    Elements of x's rows, and of the weight's rows or columns, lie side by side. A row's bits are
    the same whatever T and its place. ValueError elsewhere: a CPU's is not made here.
    """
    _check(x[:, None], weight[None], bias)
    return _matmul(x[:, None], weight[None], bias)[:, 0]


def batch_invariant_bmm(x: Tensor, weight: Tensor) -> Tensor:
    """Each head by its own weight: x [T, H, K], weight [H, N, K]; [T, H, N]. Otherwise alike."""
    _check(x, weight, None)
    return _matmul(x, weight, None)


@dataclass(frozen=True, slots=True)
class BatchInvariantLinear:
    """`batch_invariant_matmul` of one weight."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """[T, K] to [T, N]."""
        return batch_invariant_matmul(x, self.weight, self.bias)


def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (num_rows, num_heads, num_inputs), num_outputs = x.shape, weight.shape[1]
    out = x.new_empty(num_rows, num_heads, num_outputs)
    if not out.numel():
        return out
    tiles = WIDE if x.dtype == torch.float32 else _tile_sizes(device_info(x))
    slice_size, num_slices = slicing(num_outputs, num_inputs, tiles)
    num_tiles = -(-num_rows // tiles.rows) * -(-num_outputs // tiles.outputs)
    apart = num_slices > 1 and are_few(num_tiles * num_heads)
    made = x.new_empty(num_slices, *out.shape, dtype=torch.float32) if apart else out
    launch(
        _matmul_kernel,
        (num_tiles, num_slices if apart else 1, num_heads),
        x,
        weight,
        weight if bias is None else bias,
        made,
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
        BAND=GROUP_ROWS,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if apart:
        launch(
            _add_slices,
            (-(-out.numel() // ELEMENTS_PER_PROGRAM),),
            made,
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
    """Whether a program a tile would leave the device idle."""
    return num_tiles < PROGRAMS


def slicing(num_outputs: int, num_inputs: int, tiles: Tiles) -> tuple[int, int]:
    """Return inputs per slice and the number of slices. Both depend on the weights' shape alone."""
    wanted = -(-PROGRAMS // -(-num_outputs // tiles.outputs))
    num_slices = max(min(wanted, num_inputs // MIN_SLICE, MAX_SLICES), 1)
    steps = -(-num_inputs // (num_slices * tiles.inputs))
    return steps * tiles.inputs, -(-num_inputs // (steps * tiles.inputs))


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if not use_triton(x):
        raise ValueError(f"x: expected on a GPU, not on {x.device}")
    check("x", x, ("T", "H", "K"), FLOATS)
    _, num_heads, num_inputs = x.shape
    outputs_first = weight.dim() == 3 and weight.stride(1) == 1 != weight.stride(2)
    stored = weight.transpose(1, 2) if outputs_first else weight
    inner: tuple[int | str, ...] = (num_inputs, "N") if outputs_first else ("N", num_inputs)
    check("weight", stored, (num_heads, *inner), (x.dtype,), like=x)
    if bias is not None:
        check("bias", bias, (weight.shape[1],), (x.dtype,), like=x)
    if not num_inputs:
        raise ValueError("x: at least one input expected, not 0")


def batch_invariant_matmul_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """What `batch_invariant_matmul` means, in float64."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def batch_invariant_bmm_reference(x: Tensor, weight: Tensor) -> Tensor:
    """What `batch_invariant_bmm` means, in float64."""
    return torch.stack([x[:, h].double() @ weight[h].double().T for h in range(len(weight))], 1)


def aot_cases() -> Iterator[AotCase]:
    products = ("_matmul_kernel",)
    yield AotCase(
        "4096 by 4096, 64 rows, bf16",
        lambda: batch_invariant_matmul(meta(64, 4096), meta(4096, 4096), meta(4096)),
        products=products,
        streams=("_matmul_kernel", "_add_slices"),
    )
    yield AotCase(
        "28672 by 4096, 4096 rows, bf16",
        lambda: batch_invariant_matmul(meta(4096, 4096), meta(28672, 4096)),
        products=products,
    )
    wide = {"dtype": torch.float32}
    yield AotCase(
        "4096 by 4096, 64 rows, fp32",
        lambda: batch_invariant_matmul(meta(64, 4096, **wide), meta(4096, 4096, **wide)),
    )
    yield AotCase(
        "deepseek v3, into 16 heads' latents",
        lambda: batch_invariant_bmm(
            meta(64, 16, 192)[:, :, :128], meta(16, 128, 512).transpose(1, 2)
        ),
        products=products,
    )
