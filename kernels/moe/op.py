"""Mixture of experts: the weighted sum of the outputs of each token's chosen experts.

    y_t = sum over r < k of w_tr f_e(x_t),  e = the r-th choice of token t (see `routing`)

On a CPU, the experts run one after another, each for its own rows (`expert_loop`). On a GPU, one
launch computes a product for all experts; their weights are stacked in one tensor. Choice r of
token t has the number p = t k + r:

    h_p = gate(x_t W_e + a_e),  f_p = h_p V_e + b_e,  y_t = sum of w_p f_p

where W_e and V_e are the weights of the expert's two layers, and a_e and b_e are their biases.

Rows are sorted by expert (`triton_align`). A program (`moe/triton`) computes one tile of an
expert's rows and outputs on tensor cores with float32 accumulators, and applies the gate in
registers. A token's choices are summed in order. A row's result depends on other rows only through
the tile size, because the tile size follows the mean number of rows per expert. `fixed_tiles`
removes this dependency.

If the experts are divided among ranks, each rank numbers its experts from 0 and computes only the
choices of these experts. Other choices add nothing, and the ranks' results are summed. The host
reads no tensor for this division, so a CUDA graph can capture the launches.
"""

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
from penstock.kernels.checks import FLOATS, check, check_contiguous
from penstock.kernels.moe.expert_loop import moe_forward, moe_forward_reference
from penstock.kernels.moe.triton import combine_triton, grouped_gemm_triton, tiles_for, tuned_for
from penstock.kernels.moe.triton_align import align_blocks
from penstock.kernels.triton_common.launch import use_triton


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """The gated activation between an expert's two linear layers (see `kernels/activation`)."""

    kind: Literal["silu", "gelu", "clamped"]  # "gelu" means the tanh approximation of gelu
    gain: float = 1.0  # only for "clamped": the activation is gate * sigmoid(gain * gate)
    limit: float = 0.0  # only for "clamped": largest gate and largest absolute value of up

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
    """Stacked weights of E experts of a layer, all of one dtype.

    D is the number of features of a token, and I the number of features inside an expert.
    """

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
        outputs = self.gate(inner) @ self.down[number]
        return outputs if self.down_bias is None else outputs + self.down_bias[number]


def grouped_moe_forward(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    stacks: ExpertWeights,
    fixed_tiles: bool = False,
    num_divided: int | None = None,
) -> Tensor:
    """Compute `moe_forward` with stacked weights: x is [T, D], experts and weights are [T, k].

    Args:
        fixed_tiles: on a GPU, always use the same tile size, so that a row's result does not depend
            on other rows. Otherwise, the tile size follows the number of rows.
        num_divided: None if `stacks` has all experts. If `stacks` has only the experts of this
            rank, the number of experts on all ranks together; choices of other experts add nothing.
    """
    if use_triton(x):
        _check(x, experts, weights, stacks)
        return _moe_on_device(x, experts, weights, stacks, fixed_tiles, num_divided)
    partial = num_divided is not None
    return moe_forward(x, experts, weights, len(stacks.down), stacks.expert, partial)


def _moe_on_device(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    stacks: ExpertWeights,
    fixed_tiles: bool,
    num_divided: int | None,
) -> Tensor:
    if not len(x):
        return torch.empty_like(x)
    gate, num_experts = stacks.gate, len(stacks.down)
    tiles = tiles_for(x.dtype, experts.numel() / (num_divided or num_experts), fixed_tiles)
    if not fixed_tiles:
        tiles = tuned_for(x, stacks.down, tiles)
    aligned = align_blocks(experts, num_experts, tiles.rows)
    inner = x.new_empty(experts.numel(), stacks.down.shape[1])
    outputs = x.new_empty(experts.numel(), x.shape[1])
    grouped_gemm_triton(
        x,
        stacks.gate_up,
        stacks.gate_up_bias,
        inner,
        aligned,
        tiles,
        gate=gate.kind,
        gain=gate.gain,
        limit=gate.limit,
    )
    grouped_gemm_triton(inner, stacks.down, stacks.down_bias, outputs, aligned, tiles)
    return combine_triton(outputs, weights, None if num_divided is None else (experts, num_experts))


def grouped_moe_forward_reference(
    x: Tensor, experts: Tensor, weights: Tensor, stacks: ExpertWeights
) -> Tensor:
    """Reference implementation of `grouped_moe_forward` in float64."""

    def run(number: int, rows: Tensor) -> Tensor:
        inner = rows @ stacks.gate_up[number].double()
        if stacks.gate_up_bias is not None:
            inner = inner + stacks.gate_up_bias[number].double()
        outputs = stacks.gate.reference(inner) @ stacks.down[number].double()
        return outputs if stacks.down_bias is None else outputs + stacks.down_bias[number].double()

    num_experts = len(stacks.down)
    return moe_forward_reference(x.double(), experts, weights.double(), num_experts, run)


def _check(x: Tensor, experts: Tensor, weights: Tensor, stacks: ExpertWeights) -> None:
    size = x.shape[-1]
    check("x", x, ("T", size), FLOATS)
    check("experts", experts, (len(x), "k"), (torch.int32,), like=x)
    check("weights", weights, tuple(experts.shape), (torch.float32,), like=x)
    check_contiguous("weights", weights)
    for name, stack in (("gate_up", stacks.gate_up), ("down", stacks.down)):
        if stack.dim() != 3:
            raise ValueError(f"{name} has {stack.dim()} dimensions: expected 3")
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
    """Check the shape and dtype of a stack. One of its last two dimensions must have stride 1."""
    inner_first = stack.stride(1) == 1
    order = (shape[0], shape[2], shape[1]) if inner_first else shape
    check(name, stack.transpose(1, 2) if inner_first else stack, order, (x.dtype,), like=x)
