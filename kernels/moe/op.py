"""Mixture of experts: the weighted sum of the outputs of each token's chosen experts.

    y_t = sum over r < k of w_tr f_e(x_t),  e = the r-th choice of token t (see `routing`)

On a CPU, the experts run one after another, each for its own rows. On a GPU, one launch computes a
product for all experts; their weights are stacked in one tensor. Choice r of token t has the number
p = t k + r:

    h_p = gate(x_t W_e + a_e),  f_p = h_p V_e + b_e,  y_t = sum of w_p f_p

Rows are sorted by expert (`moe/align`). A program computes one tile of an expert's rows and
outputs on tensor cores with float32 accumulators, and applies the gate in registers. A token's
choices are summed in order. Only the tile size makes a row's result depend on other rows, because
the tile size follows the mean number of rows per expert; `fixed_tiles` removes this dependency.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from penstock.kernels.activation.op import (
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_reference,
    silu_and_mul,
    silu_and_mul_reference,
    swiglu_oai,
    swiglu_oai_reference,
)
from penstock.kernels.moe.align import AlignedTokens, align_blocks
from penstock.kernels.moe.expert_loop import moe_forward, moe_forward_reference
from penstock.kernels.triton_common.aot import AotCase, meta
from penstock.kernels.triton_common.launch import (
    FLOATS,
    check,
    check_contiguous,
    jit,
    launch,
    tl,
    use_triton,
)


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """The gated activation between an expert's two linear layers: see `kernels/activation`."""

    kind: Literal["silu", "gelu", "clamped"]  # "gelu": the tanh approximation
    gain: float = 1.0  # for "clamped" only: the gate's sigmoid is taken of gain * gate
    limit: float = 0.0  # for "clamped" only: largest value of gate and |up|

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Map [T, 2 I] to [T, I]."""
        match self.kind:
            case "silu":
                return silu_and_mul(gate_up)
            case "gelu":
                return gelu_tanh_and_mul(gate_up)
            case "clamped":
                return swiglu_oai(gate_up, self.gain, self.limit)

    def reference(self, gate_up: Tensor) -> Tensor:
        """Reference implementation of `__call__`."""
        match self.kind:
            case "silu":
                return silu_and_mul_reference(gate_up)
            case "gelu":
                return gelu_tanh_and_mul_reference(gate_up)
            case "clamped":
                return swiglu_oai_reference(gate_up, self.gain, self.limit)


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Stacked weights of all experts of a layer, all of one dtype."""

    gate_up: Tensor  # [E, D, 2 I]; stride 1 along one of the last two dimensions
    down: Tensor  # [E, I, D]; stride 1 along one of the last two dimensions
    gate: GatedActivation
    gate_up_bias: Tensor | None = None  # [E, 2 I]
    down_bias: Tensor | None = None  # [E, D]

    def expert(self, number: int, rows: Tensor) -> Tensor:
        """Return the outputs [n, D] of expert `number` for `rows` [n, D]."""
        inner = rows @ self.gate_up[number]
        if self.gate_up_bias is not None:
            inner += self.gate_up_bias[number]
        made = self.gate(inner) @ self.down[number]
        return made if self.down_bias is None else made + self.down_bias[number]


def grouped_moe_forward(
    x: Tensor, experts: Tensor, weights: Tensor, stacks: ExpertWeights, fixed_tiles: bool = False
) -> Tensor:
    """Run `moe_forward` with stacked weights: x is [T, D], experts and weights are [T, k].

    fixed_tiles: on a GPU, always use the same tile size, so that a row's result does not depend on
    other rows. Otherwise the tile size follows the number of rows.
    """
    if use_triton(x):
        return _moe_on_device(x, experts, weights, stacks, fixed_tiles)
    return moe_forward(x, experts, weights, len(stacks.down), stacks.expert)


def grouped_moe_forward_reference(
    x: Tensor, experts: Tensor, weights: Tensor, stacks: ExpertWeights
) -> Tensor:
    """Reference implementation of `grouped_moe_forward` in float64."""

    def run(number: int, rows: Tensor) -> Tensor:
        inner = rows @ stacks.gate_up[number].double()
        if stacks.gate_up_bias is not None:
            inner = inner + stacks.gate_up_bias[number].double()
        made = stacks.gate.reference(inner) @ stacks.down[number].double()
        return made if stacks.down_bias is None else made + stacks.down_bias[number].double()

    num_experts = len(stacks.down)
    return moe_forward_reference(x.double(), experts, weights.double(), num_experts, run)


@jit
def _gated(made, gain, limit, GATE: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Apply the gate to interleaved (gate, up) columns: [ROWS, 2 OUTPUTS] to [ROWS, OUTPUTS]."""
    gate, up = tl.split(tl.reshape(made, (ROWS, OUTPUTS, 2)))
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
def _grouped_gemm(
    x,  # with GATE: [T, K], one row per token; without: [T * k, K] sorted by expert
    weight,  # [E, K, N] with stride 1 along K or along N
    bias,  # [E, N]; read only with HAS_BIAS
    out,  # with GATE: [T * k, N / 2] sorted by expert; without: [T * k, N] in order of choices
    order,  # `order`, `tiles` and `num_tiles`: see `AlignedTokens`
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
    """Compute one tile of one expert's rows and outputs. Grid: max_tiles * output tiles."""
    # Consecutive programs compute the same output columns, so they share an expert's weights in L2.
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
        # Interleave gate and up columns in the tile; the weights store all gates, then all ups.
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
def _combine(
    made,  # [T * TOP_K, D]
    weights,  # [T, TOP_K] float32
    out,  # [T, D]
    size,  # D
    TOP_K: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sum a token's weighted expert outputs in the order of choices. Grid: (T, tiles of D)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < size
    total = tl.zeros((TILE,), tl.float32)
    for rank in tl.static_range(TOP_K):
        value = tl.load(made + (token * TOP_K + rank) * size + column, mask=inside, other=0.0)
        total += tl.load(weights + token * TOP_K + rank) * value.to(tl.float32)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=inside)


@dataclass(frozen=True, slots=True)
class Tiles:
    rows: int
    outputs: int  # columns of the weights: gate and up columns together
    inputs: int
    num_warps: int
    num_stages: int


FEW = Tiles(16, 128, 64, num_warps=4, num_stages=4)
SOME = Tiles(64, 128, 64, num_warps=4, num_stages=3)
MANY = Tiles(128, 128, 64, num_warps=8, num_stages=3)
WIDE = Tiles(32, 64, 32, num_warps=4, num_stages=2)  # for float32, without tensor cores

ELEMENTS_PER_PROGRAM = 2048  # columns per program of `_combine`


def tiles_for(dtype: torch.dtype, mean_rows: float, batch_invariant: bool) -> Tiles:
    """Return the tile sizes for a mean of `mean_rows` rows per expert."""
    if dtype == torch.float32:
        return WIDE
    if batch_invariant:
        return SOME
    if mean_rows <= FEW.rows:
        return FEW
    return SOME if mean_rows <= SOME.rows else MANY


def _moe_on_device(
    x: Tensor, experts: Tensor, weights: Tensor, stacks: ExpertWeights, fixed_tiles: bool
) -> Tensor:
    _check(x, experts, weights, stacks)
    (num_tokens, top_k), num_experts = experts.shape, len(stacks.down)
    if not num_tokens:
        return torch.empty_like(x)
    tiles = tiles_for(x.dtype, experts.numel() / num_experts, fixed_tiles)
    found = align_blocks(experts, num_experts, tiles.rows)
    size, inner_size = x.shape[1], stacks.down.shape[1]
    inner, made = x.new_empty(experts.numel(), inner_size), x.new_empty(experts.numel(), size)
    _launch(x, stacks.gate_up, stacks.gate_up_bias, inner, found, tiles, top_k, stacks.gate)
    _launch(inner, stacks.down, stacks.down_bias, made, found, tiles, top_k, None)
    out = x.new_empty(num_tokens, size)
    grid = (num_tokens, -(-size // ELEMENTS_PER_PROGRAM))
    launch(_combine, grid, made, weights, out, size, TOP_K=top_k, TILE=ELEMENTS_PER_PROGRAM)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    found: AlignedTokens,
    tiles: Tiles,
    top_k: int,
    gate: GatedActivation | None,
) -> None:
    _, num_inputs, num_outputs = weight.shape
    programs = found.max_tiles * -(-num_outputs // tiles.outputs)
    launch(
        _grouped_gemm,
        (programs,),
        x,
        weight,
        weight if bias is None else bias,
        out,
        found.order,
        found.tiles,
        found.num_tiles,
        found.max_tiles,
        top_k,
        num_outputs,
        num_inputs,
        x.stride(0),
        *weight.stride(),
        gate.gain if gate else 0.0,
        gate.limit if gate else 0.0,
        GATE=gate.kind if gate else "",
        HAS_BIAS=bias is not None,
        TILE_ROWS=tiles.rows,
        TILE_OUTPUTS=tiles.outputs,
        TILE_INPUTS=tiles.inputs,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def _check(x: Tensor, experts: Tensor, weights: Tensor, stacks: ExpertWeights) -> None:
    size = x.shape[-1]
    check("x", x, ("T", size), FLOATS)
    check("experts", experts, (len(x), "k"), (torch.int32,), like=x)
    check("weights", weights, tuple(experts.shape), (torch.float32,), like=x)
    check_contiguous("weights", weights)
    for name, stack in (("gate_up", stacks.gate_up), ("down", stacks.down)):
        if stack.dim() != 3:
            raise ValueError(f"{name}: three dimensions expected, not {stack.dim()}")
    num_experts, inner_size, _ = stacks.down.shape
    _check_stack("gate_up", stacks.gate_up, (num_experts, size, 2 * inner_size), x)
    _check_stack("down", stacks.down, (num_experts, inner_size, size), x)
    shapes = {"gate_up_bias": 2 * inner_size, "down_bias": size}
    for name, width in shapes.items():
        bias: Tensor | None = getattr(stacks, name)
        if bias is not None:
            check(name, bias, (num_experts, width), (x.dtype,), like=x)
            check_contiguous(name, bias)


def _check_stack(name: str, stack: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    """Check a stack's shape and dtype; either of its last two dimensions may have stride 1."""
    inner_first = stack.stride(1) == 1
    order = (shape[0], shape[2], shape[1]) if inner_first else shape
    check(name, stack.transpose(1, 2) if inner_first else stack, order, (x.dtype,), like=x)


def aot_cases() -> Iterator[AotCase]:
    def mix(
        num_tokens: int, num_experts: int, size: int, inner: int, gate: GatedActivation
    ) -> Tensor:
        """Run a layer that chooses 8 experts per token."""
        gate_up, down = meta(num_experts, 2 * inner, size), meta(num_experts, size, inner)
        if gate.kind == "clamped":
            stacks = ExpertWeights(
                gate_up.view(num_experts, size, 2 * inner),
                down.view(num_experts, inner, size),
                gate,
                meta(num_experts, 2 * inner),
                meta(num_experts, size),
            )
        else:
            stacks = ExpertWeights(gate_up.transpose(1, 2), down.transpose(1, 2), gate)
        chosen = meta(num_tokens, 8, dtype=torch.int32)
        weights = meta(num_tokens, 8, dtype=torch.float32)
        return grouped_moe_forward(meta(num_tokens, size), chosen, weights, stacks)

    def qwen(num_tokens: int) -> Tensor:
        return mix(num_tokens, 128, 2048, 768, GatedActivation("silu"))

    products, streams = ("_grouped_gemm",), ("_combine",)
    yield AotCase("8 of 128, a token, bf16", lambda: qwen(1), products, streams)
    yield AotCase("8 of 128, 512 tokens, bf16", lambda: qwen(512), products, streams)
    yield AotCase("8 of 128, 4096 tokens, bf16", lambda: qwen(4096), products, streams)
    clamped = GatedActivation("clamped", 1.702, 7.0)
    yield AotCase("gpt-oss, bf16", lambda: mix(64, 32, 2880, 2880, clamped), products, streams)
