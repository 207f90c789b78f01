"""Cases in which `make aot` compiles the kernels of `kernels/moe` ahead of time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels.moe.op import (
    ExpertWeights,
    GatedActivation,
    grouped_moe_forward,
)
from penstock.kernels.moe.routing import Routing, route
from penstock.kernels.moe.triton_align import AlignedTokens, align_blocks
from tests.aot.case import AotCase, meta


def _expert_cases() -> Iterator[AotCase]:
    def mix(
        num_tokens: int,
        num_experts: int,
        size: int,
        inner: int,
        gate: GatedActivation,
        num_divided: int | None = None,
    ) -> Tensor:
        """Run an MoE layer with 8 experts per token; `grouped_moe_forward` gets `num_divided`."""
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
        x = meta(num_tokens, size)
        return grouped_moe_forward(x, chosen, weights, stacks, num_divided=num_divided)

    def qwen(num_tokens: int) -> Tensor:
        return mix(num_tokens, 128, 2048, 768, GatedActivation("silu"))

    products, streams = ("_grouped_gemm_kernel",), ("_combine_kernel",)
    yield AotCase("8 of 128, a token, bf16", lambda: qwen(1), products, streams)
    yield AotCase("8 of 128, 512 tokens, bf16", lambda: qwen(512), products, streams)
    yield AotCase("8 of 128, 4096 tokens, bf16", lambda: qwen(4096), products, streams)
    silu = GatedActivation("silu")
    divided = "8 of 128 on 4 ranks, 64 tokens, bf16"
    yield AotCase(divided, lambda: mix(64, 32, 2048, 768, silu, 128), products, streams)
    clamped = GatedActivation("clamped", 1.702, 7.0)
    yield AotCase("gpt-oss, bf16", lambda: mix(64, 32, 2880, 2880, clamped), products, streams)


def _routing_cases() -> Iterator[AotCase]:
    plain, deepseek = Routing(8, True), Routing(8, True, True, 8, 4, 2, 2.5)
    wide = {"dtype": torch.float32}
    yield AotCase("qwen3 moe: 8 of 128", lambda: route(meta(64, 128), plain))
    yield AotCase(
        "deepseek v3: 8 of 256, grouped",
        lambda: route(meta(64, 256, **wide), deepseek, meta(256, **wide)),
    )


def _align_cases() -> Iterator[AotCase]:
    def sort(num_tokens: int, num_experts: int) -> AlignedTokens:
        return align_blocks(meta(num_tokens, 8, dtype=torch.int32), num_experts, 64)

    yield AotCase("a token, 8 of 128", lambda: sort(1, 128))
    yield AotCase("4096 tokens, 8 of 256", lambda: sort(4096, 256))


def aot_cases() -> Iterator[AotCase]:
    yield from _expert_cases()
    yield from _routing_cases()
    yield from _align_cases()
