"""Benchmarks of token sampling and of mixture-of-experts layers."""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.moe.op import ExpertWeights, GatedActivation, grouped_moe_forward
from penstock.kernels.moe.routing import Routing, route
from penstock.kernels.sampling.op import SamplingTensors, sample
from penstock.loadtests.gpu.clock import Call
from penstock.loadtests.gpu.goals import Goal
from penstock.loadtests.gpu.model_bytes import expected_fraction
from penstock.loadtests.gpu.row_work import flashinfer
from penstock.loadtests.gpu.work import Work

TOP_K, TOP_P = 50, 0.9


def draw_work(device: torch.device, small: bool) -> Work:
    """Return a benchmark of top-k and top-p sampling of a whole batch."""
    rows, vocab = (4, 300) if small else (256, 128_000)

    def logits() -> Tensor:
        return torch.randn(rows, vocab, device=device) * 3

    def ours() -> Call:
        found, params = logits(), _sampling_tensors(rows, device)
        return lambda: sample(found, params)

    def by_torch() -> Call:
        found = logits()

        def whole() -> Tensor:
            values, indices = found.topk(TOP_K)
            chances = values.softmax(-1)
            kept = chances.cumsum(-1) - chances < TOP_P
            drawn = torch.multinomial(chances * kept, 1)
            return indices.gather(1, drawn)

        return whole

    def by_flashinfer() -> Call:
        found, sampling = logits(), flashinfer().sampling
        return lambda: sampling.top_k_top_p_sampling_from_logits(found, TOP_K, TOP_P)

    return Work(
        f"draw by top-k and top-p, {rows} x {vocab}",
        Goal(most_us=80),
        rows * vocab * 4,
        0,
        ours,
        {"torch, top-k alone sorted": by_torch, "FlashInfer": by_flashinfer},
    )


def _sampling_tensors(rows: int, device: torch.device) -> SamplingTensors:
    def all_of(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((rows,), value, dtype=dtype, device=device)

    wide = torch.int64
    return SamplingTensors(
        temperature=all_of(0.8, torch.float32),
        top_p=all_of(TOP_P, torch.float32),
        min_p=all_of(0, torch.float32),
        typical_p=all_of(1, torch.float32),
        top_k=all_of(TOP_K, wide),
        seeds=torch.arange(rows, dtype=wide, device=device),
        indices=all_of(7, wide),
        choices=all_of(0, wide),
    )


def expert_work(device: torch.device, dtype: torch.dtype, small: bool) -> Iterator[Work]:
    """Yield benchmarks of an MoE layer for several numbers of tokens.

    The shape has 128 experts, 8 per token, hidden size 2816 and intermediate size 704. Other
    projects have published results for this shape.
    """
    num_experts, top_k, hidden, inner = (8, 2, 64, 32) if small else (128, 8, 2816, 704)
    goals = {1: Goal(most_us=60), 64: Goal(least_fraction=0.90), 4096: Goal(least_tflops=400)}
    stacks = ExpertWeights(
        torch.randn(num_experts, 2 * inner, hidden, device=device).to(dtype).transpose(1, 2),
        torch.randn(num_experts, hidden, inner, device=device).to(dtype).transpose(1, 2),
        GatedActivation("silu"),
    )
    for tokens, goal in goals.items():
        yield _experts(min(tokens, 8) if small else tokens, goal, top_k, stacks, device)


def _experts(
    tokens: int, goal: Goal, top_k: int, stacks: ExpertWeights, device: torch.device
) -> Work:
    num_experts, hidden, width = stacks.gate_up.shape
    dtype = stacks.gate_up.dtype
    expert_bytes = 3 * hidden * (width // 2) * dtype.itemsize
    routing = Routing(top_k, normalise=True)

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(tokens, hidden, device=device).to(dtype)
        logits = torch.randn(tokens, num_experts, device=device)
        return x, *route(logits, routing)

    def ours() -> Call:
        x, experts, weights = inputs()
        return lambda: grouped_moe_forward(x, experts, weights, stacks)

    def by_torch() -> Call:
        x, experts, weights = inputs()
        order = experts.flatten().long().argsort()
        counts = torch.bincount(experts.flatten().long(), minlength=num_experts)
        ends, rows = counts.cumsum(0).to(torch.int32), order // top_k
        row_weights = weights.flatten()[order].to(dtype)[:, None]

        def grouped() -> Tensor:
            """Run grouped matmuls on sorted rows.

            The time of sorting counts only for our implementation.
            """
            both = torch._grouped_mm(x[rows], stacks.gate_up, offs=ends)
            gate, up = both.chunk(2, -1)
            made = torch._grouped_mm(functional.silu(gate) * up, stacks.down, offs=ends)
            return torch.zeros_like(x).index_add_(0, rows, made * row_weights)

        return grouped

    touched = num_experts * expected_fraction(num_experts, top_k, tokens)
    return Work(
        f"experts, {tokens} tokens, {num_experts} of which {top_k}",
        goal,
        touched * expert_bytes + 2 * tokens * hidden * dtype.itemsize,
        6 * tokens * top_k * hidden * (width // 2),
        ours,
        {"torch grouped product, sorted before": by_torch},
        warm=True,  # one copy is enough, because the weights do not fit in any cache
    )
