"""Builds the CPU step graph of a decoder, for decode steps (one token per sequence).

Step graphs support float32 models on one rank with gated feed-forward layers and RMS norms (Llama,
Mistral, Qwen, Gemma and similar), including experts chosen by a plain softmax. The operations of
other models are called separately.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.activation.op import (
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_batch_invariant,
    silu_and_mul,
    silu_and_mul_batch_invariant,
)
from penstock.kernels.moe.routing import Routing
from penstock.kernels.step_graph.builder import (
    AttentionParams,
    Buffer,
    CpuStepGraph,
    GraphBuilder,
    UnsupportedGraph,
    load_cpu_kernels,
)
from penstock.kernels.step_graph.layout import ExpertLayout
from penstock.kernels.triton_common.launch import runs_kernels
from penstock.workers.layers.attention import Attention
from penstock.workers.layers.decoder_layer import DecoderLayer
from penstock.workers.layers.linear import Linear, RowParallelLinear
from penstock.workers.layers.mlp import Mlp
from penstock.workers.layers.moe import MoE, SharedExpert
from penstock.workers.layers.norm import GemmaRmsNorm, Norm, RmsNorm
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.protocols import Model
from penstock.workers.parallel.parallel_groups import SINGLE_RANK
from penstock.workers.rank.kv_cache import KvCache
from penstock.workers.scheduling.sequence import Ints, StepPlan

MAX_ROWS = 128
"""Maximum number of tokens of a step. In larger steps, the saved call overhead is negligible."""

_GATES: dict[Callable[[Tensor], Tensor], str] = {
    silu_and_mul: "silu",
    silu_and_mul_batch_invariant: "silu",
    gelu_tanh_and_mul: "gelu",
    gelu_tanh_and_mul_batch_invariant: "gelu",
}


@dataclass(frozen=True, slots=True)
class DecodeStepGraph:
    """Step graph of a decoder; runs steps in which every sequence has one token."""

    decoder: Decoder
    graph: CpuStepGraph
    hidden: Buffer
    angles: tuple[Buffer, ...]  # per rotary table: cosines and sines of the tokens' positions
    logits: Buffer | None  # None: the graph does not support the head, so the head runs afterwards

    def supports(self, plan: StepPlan) -> bool:
        """Return whether the graph can run this step."""
        return len(plan.tokens) == len(plan.rows) <= MAX_ROWS

    def run(self, plan: StepPlan, tokens: Ints, rotary: tuple[Tensor, ...]) -> Tensor:
        """Run a step and return its logits.

        Args:
            plan: the step, with one token per sequence.
            tokens: [T] token ids.
            rotary: the complete rotary tables, each [positions, 2, R].

        Returns:
            [T, vocab_size], valid until the next run.
        """
        decoder, program, num_rows = self.decoder, self.graph, len(tokens)
        assert decoder.embeddings is not None
        hidden = program.view(self.hidden, num_rows)
        np.take(decoder.embeddings.numpy(), tokens, 0, hidden.numpy())
        if decoder.embedding_scale != 1:
            hidden *= decoder.embedding_scale
        for buffer, table in zip(self.angles, rotary, strict=True):
            rows = program.view(buffer, num_rows).numpy()
            np.take(table.view(len(table), -1).numpy(), plan.positions, 0, rows)
        program.run(plan.slots, plan.context_lens, plan.block_tables)
        if self.logits is None:
            return decoder.logits(hidden)
        return decoder.cap_logits(program.view(self.logits, num_rows))


def build_cpu_step_graph(decoder: Model, cache: KvCache) -> DecodeStepGraph | None:
    """Build the step graph of a model and its cache; return None for an unsupported model."""
    device = cache.data.device
    if not isinstance(decoder, Decoder) or decoder.ranks is not SINGLE_RANK or runs_kernels(device):
        return None
    if device.type != "cpu" or decoder.dtype != torch.float32 or decoder.embedding_norm:
        return None
    try:
        written = _lower(decoder, cache.data)
    except UnsupportedGraph:
        return None
    load_cpu_kernels(cache.data.dtype)
    return written


def _lower(decoder: Decoder, cache: Tensor) -> DecodeStepGraph:
    writer = GraphBuilder(MAX_ROWS, cache)
    hidden = writer.alloc(decoder.spec.hidden_size)
    angles = tuple(writer.alloc(2 * 2 * len(each.frequencies)) for each in decoder.rotaries)
    layers = _LayerLowering(
        writer, hidden, writer.alloc(hidden.width), writer.alloc(hidden.width), angles
    )
    for number, block in enumerate(decoder.layers):
        layers.lower_layer(number, block)
    logits = layers.lower_head(decoder)
    return DecodeStepGraph(decoder, writer.build(), hidden, angles, logits)


@dataclass(frozen=True, slots=True)
class _LayerLowering:
    """Adds the decoder's layers to the graph, one after another.

    A layer stores the output of its feed-forward in `made`; the next layer's first norm adds `made`
    to `hidden`.
    """

    builder: GraphBuilder
    hidden: Buffer
    normal: Buffer
    made: Buffer
    angles: tuple[Buffer, ...]
    expert_layouts: dict[tuple[int, int], ExpertLayout] = field(default_factory=dict)

    def lower_layer(self, number: int, block: DecoderLayer) -> None:
        if block.parallel or block.attention_norm is None or block.mlp_norm is None:
            raise UnsupportedGraph("a parallel block, or a layer without norms before its halves")
        if not isinstance(block.attention, Attention):
            raise UnsupportedGraph(f"{type(block.attention).__name__}")
        self._norm(block.attention_norm, added=number > 0)
        self._attention(block.attention, number)
        self._norm_made(block.attention_post_norm)
        self._norm(block.mlp_norm, added=True)
        match block.mlp:
            case Mlp():
                self._mlp(block.mlp, self.made)
            case MoE():
                self._experts(block.mlp)
            case _:
                raise UnsupportedGraph(f"{type(block.mlp).__name__}")
        self._norm_made(block.mlp_post_norm)

    def lower_head(self, decoder: Decoder) -> Buffer | None:
        """Add the head and return the buffer of the logits.

        If the head is not supported, return None; after a run, `hidden` then has the output of the
        last layer.
        """
        assert decoder.norm is not None
        assert decoder.head is not None
        logits = self.builder.alloc(decoder.spec.vocab_size)
        if self.builder.supports_linear(self.normal, decoder.head.packed, logits):
            self._norm(decoder.norm, added=True)
            self.builder.linear(self.normal, decoder.head.packed, logits)
            return logits
        self.builder.add(self.hidden, self.made)
        return None

    def _norm(self, norm: Norm, added: bool) -> None:
        weight, eps = _rms(norm)
        more = self.made if added else None
        self.builder.norm(self.hidden, weight, eps, self.normal, more)

    def _norm_made(self, norm: Norm | None) -> None:
        if norm is not None:
            self.builder.norm(self.made, *_rms(norm), self.made)

    def _attention(self, attention: Attention, number: int) -> None:
        if attention.clip or attention.biases is not None:
            raise UnsupportedGraph("clamped queries, keys and values, or rounded ALiBi biases")
        writer, dim = self.builder, attention.head_dim
        num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
        heads = self.builder.scratch("heads", (num_heads + 2 * num_kv_heads) * dim)
        writer.linear(self.normal, attention.qkv.packed, heads)
        if attention.q_norm is not None and attention.k_norm is not None:
            self._norm_heads(attention.q_norm, heads, 0, num_heads * dim)
            self._norm_heads(attention.k_norm, heads, num_heads * dim, num_kv_heads * dim)
        angles = None if attention.rotary is None else self.angles[attention.rotary]
        how = AttentionParams(
            num_heads, num_kv_heads, dim, angles, attention.interleaved, attention.window,
            attention.scores,
        )  # fmt: skip
        out = self.builder.scratch("attended", num_heads * dim)
        writer.attend(heads, how, number, out)
        writer.linear(out, _unsharded(attention.output).packed, self.made)

    def _norm_heads(self, norm: Norm, heads: Buffer, first: int, size: int) -> None:
        weight, eps = _rms(norm)
        if first % len(weight):
            raise UnsupportedGraph("a norm over all heads together")
        groups = slice(first // len(weight), (first + size) // len(weight))
        self.builder.norm(heads, weight, eps, heads, groups=groups)

    def _mlp(self, mlp: Mlp, out: Buffer) -> None:
        writer, width, kind = self.builder, sum(mlp.gate_up.sizes), _gate_kind(mlp)
        both, inner = (
            self.builder.scratch("gate and up", width),
            self.builder.scratch("gated", width // 2),
        )
        writer.linear(self.normal, mlp.gate_up.packed, both)
        writer.gate(both, kind, inner)
        writer.linear(inner, _unsharded(mlp.down).packed, out)

    def _experts(self, experts: MoE) -> None:
        routing, router, num_experts = experts.routing, experts.router, len(experts.experts)
        if routing != Routing(routing.top_k, routing.normalise) or experts.bias is not None:
            raise UnsupportedGraph(f"{routing}")
        layout = self._expert_layout(num_experts, routing.top_k)
        logits = self.builder.scratch("logits", num_experts)
        weights = self.builder.scratch("weights of experts", routing.top_k)
        self.builder.gemv(self.normal, _unpacked_weight(router), logits)
        self.builder.topk_softmax(logits, layout, routing.normalise, weights)
        # Add the shared expert here: threads waiting for the routing then prefetch its weights.
        shared = gate = None
        if experts.shared is not None:
            shared, gate = self._shared(experts.shared)
        made = self._routed_experts(experts.experts, layout)
        self.builder.unpermute_sum(made, layout, weights, self.made, shared, gate)

    def _expert_layout(self, num_experts: int, top_k: int) -> ExpertLayout:
        if (num_experts, top_k) not in self.expert_layouts:
            self.expert_layouts[num_experts, top_k] = self.builder.expert_layout(num_experts, top_k)
        return self.expert_layouts[num_experts, top_k]

    def _shared(self, shared: SharedExpert) -> tuple[Buffer, Buffer | None]:
        """Add the shared expert; return the buffers of its output and of its gate, if any."""
        made, gate = self.builder.scratch("shared", self.made.width), None
        if shared.gate is not None:
            gate = self.builder.scratch("gate of the shared", 1)
            self.builder.gemv(self.normal, _unpacked_weight(shared.gate), gate)
        self._mlp(shared.mlp, made)
        return made, gate

    def _routed_experts(self, mlps: tuple[Mlp, ...], layout: ExpertLayout) -> Buffer:
        """Add the routed experts; return the buffer of their outputs, in the order of `layout`."""
        writer, width = self.builder, sum(mlps[0].gate_up.sizes)
        x, made = (
            self.builder.scratch(name, self.made.width, layout) for name in ("normal", "made")
        )
        both = self.builder.scratch("gate and up", width, layout)
        inner = self.builder.scratch("gated", width // 2, layout)
        writer.permute(self.normal, layout, x)
        writer.expert_linears(x, [mlp.gate_up.packed for mlp in mlps], both, layout)
        writer.gate(both, _gate_kind(mlps[0]), inner, layout)
        writer.expert_linears(inner, [_unsharded(mlp.down).packed for mlp in mlps], made, layout)
        return made


def _gate_kind(mlp: Mlp) -> str:
    kind = _GATES.get(mlp.activation)
    if kind is None:
        raise UnsupportedGraph("an activation other than gated SiLU or GELU (tanh)")
    return kind


def _unpacked_weight(linear: Linear) -> Tensor:
    if linear.packed is not None or linear.bias is not None:
        raise UnsupportedGraph("a router with packed weights or a bias")
    return linear.weight


def _rms(norm: Norm) -> tuple[Tensor, float]:
    match norm:
        case RmsNorm():
            return norm.weight, norm.eps
        case GemmaRmsNorm():
            return 1.0 + norm.weight, norm.eps
        case _:
            raise UnsupportedGraph(f"the norm {type(norm).__name__}")


def _unsharded(linear: Linear | RowParallelLinear) -> Linear:
    if isinstance(linear, RowParallelLinear):
        raise UnsupportedGraph("a linear layer divided among several ranks")
    return linear
