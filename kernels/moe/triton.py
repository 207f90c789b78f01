"""Triton kernels of the experts: grouped product and weighted sum (see `moe/op`)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.moe.triton_align import AlignedTokens
from penstock.kernels.triton_common.launch import device_info, jit, launch, tl
from penstock.kernels.triton_common.tuned_tiles import tuned_tiles


@jit
def _gated(sums, gain, limit, GATE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Apply the gate to a tile [ROWS, 2 OUTPUTS] of interleaved (gate, up) columns.

    The result is [ROWS, OUTPUTS].
    """
    gate, up = tl.split(tl.reshape(sums, (ROWS, OUTPUTS, 2)))
    if GATE == "clamped":
        # Unlike min and max, `where` propagates NaN.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up)) + 1
        inner = gate * gain
    elif GATE == "gelu":
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
    else:
        inner = gate
    return gate / (1 + tl.exp(-inner)) * up


@jit(unspecialized=("max_tiles",))
def _grouped_gemm_kernel(
    x,  # with GATE: [T, K], one row per token; without GATE: [T * k, K] sorted by expert
    weight,  # [E, K, N] with stride 1 along K or along N
    bias,  # [E, N]; read only with HAS_BIAS
    out,  # with GATE: [T * k, N / 2] by expert; without GATE: [T * k, N] in the order of choices
    order,  # `order`, `tiles` and `num_tiles` are fields of `AlignedTokens`
    tiles,
    num_tiles,
    max_tiles,
    top_k,
    num_outputs,  # N
    num_inputs,
    x_stride,
    expert_stride,
    input_stride,
    output_stride,
    gain,
    limit,
    GATE: tl.constexpr,  # `GatedActivation.kind`, or "" for a product without gate
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_OUTPUTS: tl.constexpr,
    TILE_INPUTS: tl.constexpr,
):
    """Compute one tile of one expert's rows and outputs.

    The grid is [max_tiles * output tiles]. T is the number of tokens, k the number of choices per
    token, E the number of experts, K the number of inputs, and N the number of outputs.
    """
    # Consecutive programs compute the same output columns, so that programs for the same expert
    # share its weights in the L2 cache.
    tile = tl.program_id(0) % max_tiles
    first_output = tl.program_id(0) // max_tiles * TILE_OUTPUTS
    if tile >= tl.load(num_tiles):
        return
    expert = tl.load(tiles + tile).to(tl.int64)
    first = tl.load(tiles + max_tiles + tile)
    count = tl.load(tiles + 2 * max_tiles + tile)
    row = tl.arange(0, TILE_ROWS)
    has_row = row < count
    choice = tl.load(order + first + row, mask=has_row, other=0)
    column = first_output + tl.arange(0, TILE_OUTPUTS)
    has_column = column < num_outputs
    if GATE == "silu" or GATE == "gelu":
        # The tile has interleaved gate and up columns. For these gates, the weights store all gate
        # columns, then all up columns.
        column = column // 2 + column % 2 * (num_outputs // 2)
    source = (choice // top_k if GATE != "" else first + row).to(tl.int64)
    x_rows = x + source[:, None] * x_stride
    columns = weight + expert * expert_stride + column.to(tl.int64)[None, :] * output_stride

    acc = tl.zeros((TILE_ROWS, TILE_OUTPUTS), tl.float32)
    for start in range(0, num_inputs, TILE_INPUTS):
        inputs = start + tl.arange(0, TILE_INPUTS)
        has_input = inputs < num_inputs
        left = tl.load(
            x_rows + inputs[None, :], mask=has_row[:, None] & has_input[None, :], other=0.0
        )
        right = tl.load(
            columns + inputs[:, None] * input_stride,
            mask=has_input[:, None] & has_column[None, :],
            other=0.0,
        )
        acc = tl.dot(left, right, acc, input_precision="ieee")
    if HAS_BIAS:
        shift = tl.load(bias + expert * num_outputs + column, mask=has_column, other=0.0)
        acc += shift.to(tl.float32)[None, :]

    if GATE != "":
        acc = _gated(acc, gain, limit, GATE, TILE_ROWS, TILE_OUTPUTS // 2)
        column = first_output // 2 + tl.arange(0, TILE_OUTPUTS // 2)
        num_outputs = num_outputs // 2
        target = first + row
    else:
        target = choice
    at = target.to(tl.int64)[:, None] * num_outputs + column[None, :]
    has = has_row[:, None] & (column < num_outputs)[None, :]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=has)


@jit
def _combine_kernel(
    outputs,  # [T * TOP_K, D]
    weights,  # [T, TOP_K] float32
    experts,  # [T, TOP_K] int32; read only with PARTIAL
    out,  # [T, D]
    size,  # D
    num_experts,
    PARTIAL: tl.constexpr,  # skip choices whose expert is not in [0, num_experts)
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum a token's weighted expert outputs in the order of choices.

    The grid is [T, D / TILE], rounded up.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < size
    total = tl.zeros((TILE,), tl.float32)
    for rank in tl.static_range(TOP_K):
        loaded = inside
        if PARTIAL:
            expert = tl.load(experts + token * TOP_K + rank)
            loaded = inside & (expert >= 0) & (expert < num_experts)
        value = tl.load(outputs + (token * TOP_K + rank) * size + column, mask=loaded, other=0.0)
        total += tl.load(weights + token * TOP_K + rank) * value.to(tl.float32)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiles:
    rows: int
    outputs: int  # number of columns of the weights; gate and up columns are counted together
    inputs: int
    num_warps: int
    num_stages: int


FEW = Tiles(16, 128, 64, num_warps=4, num_stages=4)
SOME = Tiles(64, 128, 64, num_warps=4, num_stages=3)
MANY = Tiles(128, 128, 64, num_warps=8, num_stages=3)
WIDE = Tiles(32, 64, 32, num_warps=4, num_stages=2)  # for float32 (no tensor cores)

ELEMENTS_PER_PROGRAM = 2048  # columns per program of `_combine_kernel`


def tiles_for(dtype: torch.dtype, mean_rows: float, batch_invariant: bool) -> Tiles:
    """Return the tile sizes for a mean of `mean_rows` rows per expert."""
    if dtype == torch.float32:
        return WIDE
    if batch_invariant:
        return SOME
    if mean_rows <= FEW.rows:
        return FEW
    return SOME if mean_rows <= SOME.rows else MANY


def tuned_for(x: Tensor, down: Tensor, tiles: Tiles) -> Tiles:
    """Return the tiles that were tuned for this device, or `tiles` if none were tuned.

    Args:
        x: the layer's input.
        down: [E, I, D] weights of the experts' second layer.
        tiles: the result of `tiles_for`.
    """
    experts, inner, size = down.shape
    tuned = tuned_tiles(
        device_info(x).product,
        "moe",
        experts=experts,
        size=size,
        inner=inner,
        rows=tiles.rows,
        itemsize=x.itemsize,
    )
    return tiles if tuned is None else Tiles(**tuned)


def grouped_gemm_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    aligned: AlignedTokens,
    tiles: Tiles,
    gate: str = "",
    gain: float = 0.0,
    limit: float = 0.0,
) -> None:
    """For each choice, multiply its row by its expert's weights, and write the product to `out`.

    `gate`, `gain` and `limit` are the fields of `GatedActivation`. Without a gate, `x` has one row
    per choice instead of one per token: see `_grouped_gemm_kernel`.
    """
    _, num_inputs, num_outputs = weight.shape
    programs = aligned.max_tiles * -(-num_outputs // tiles.outputs)
    launch(
        _grouped_gemm_kernel,
        (programs,),
        x,
        weight,
        weight if bias is None else bias,
        out,
        aligned.order,
        aligned.tiles,
        aligned.num_tiles,
        aligned.max_tiles,
        aligned.top_k,
        num_outputs,
        num_inputs,
        x.stride(0),
        *weight.stride(),
        gain,
        limit,
        GATE=gate,
        HAS_BIAS=bias is not None,
        TILE_ROWS=tiles.rows,
        TILE_OUTPUTS=tiles.outputs,
        TILE_INPUTS=tiles.inputs,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def combine_triton(
    outputs: Tensor, weights: Tensor, here: tuple[Tensor, int] | None = None
) -> Tensor:
    """Return the weighted sums [T, D] of expert outputs [T k, D], with `weights` [T, k].

    Args:
        here: None if every choice has an output. Otherwise (experts [T, k], number of experts):
            choices whose expert is not in [0, number of experts) are skipped, because they have
            no outputs.
    """
    experts, num_experts = (weights, 0) if here is None else here
    (num_tokens, top_k), size = weights.shape, outputs.shape[1]
    out = outputs.new_empty(num_tokens, size)
    grid = (num_tokens, -(-size // ELEMENTS_PER_PROGRAM))
    launch(
        _combine_kernel,
        grid,
        outputs,
        weights,
        experts,
        out,
        size,
        num_experts,
        PARTIAL=here is not None,
        TOP_K=top_k,
        TILE=ELEMENTS_PER_PROGRAM,
    )
    return out
