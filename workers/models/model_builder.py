"""Builds the layers that a `ModelSpec` describes; their weights are loaded later."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.activation.op import (
    gelu,
    gelu_tanh_and_mul,
    silu_and_mul,
    silu_and_mul_batch_invariant,
    swiglu_oai,
)
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.moe.op import ExpertWeights, GatedActivation
from penstock.kernels.moe.routing import Routing
from penstock.kernels.triton_common.launch import runs_kernels
from penstock.workers.layers.attention import Attention
from penstock.workers.layers.cached_alibi import CachedAlibiBias
from penstock.workers.layers.decoder_layer import DecoderLayer
from penstock.workers.layers.expert_parallel import ExpertParallelMoE
from penstock.workers.layers.expert_stacks import ExpertStack
from penstock.workers.layers.linear import Linear, RowParallelLinear, empty_linear
from penstock.workers.layers.mla import LatentAttention
from penstock.workers.layers.mlp import Mlp
from penstock.workers.layers.moe import MoE, SharedExpert
from penstock.workers.layers.norm import GemmaRmsNorm, LayerNorm, Norm, RmsNorm
from penstock.workers.models.deepseek import LatentSpec
from penstock.workers.models.spec import ExpertsSpec, ModelSpec
from penstock.workers.parallel.parallel_groups import SINGLE_RANK, ParallelGroups

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu_and_mul,
    "gelu_pytorch_tanh": gelu_tanh_and_mul,
}
GATE_KINDS: dict[str, Literal["silu", "gelu"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
BATCH_INVARIANT_GATES: dict[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]] = {
    silu_and_mul: silu_and_mul_batch_invariant,
}
UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": gelu,
}
"""Activations of layers without a gate."""

LATENT_NORM_EPS = 1e-6  # epsilon of MLA's norms; `config.json` sets the epsilon of the other norms


@dataclass(frozen=True, slots=True)
class ModelBuilder:
    """Creates the layers of a model, or of one rank's shard of a model, on one device."""

    spec: ModelSpec  # spec of the rank's shard
    dtype: torch.dtype
    device: torch.device
    deterministic: bool = False
    ranks: ParallelGroups = SINGLE_RANK
    # True: weights will be quantized, so no float stacks of experts are allocated
    quantized: bool = False

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def linear(self, num_inputs: int, sizes: tuple[int, ...], bias: bool = False) -> Linear:
        return empty_linear(num_inputs, sizes, bias, self.dtype, self.device)

    def row_parallel_linear(
        self, num_inputs: int, size: int, bias: bool = False
    ) -> Linear | RowParallelLinear:
        """Create a linear layer whose input features are divided among the stage's ranks."""
        stage = self.ranks.stage
        if stage is None:
            return self.linear(num_inputs, (size,), bias)
        bias = bias and self.ranks.coord.tp_rank == 0
        return RowParallelLinear(self.linear(num_inputs, (size,), bias), stage)

    def norm(self, size: int) -> Norm:
        weight, eps = self.empty(size), self.spec.norm_eps
        match self.spec.norm_kind:
            case "layer":
                return LayerNorm(weight, self.empty(size), eps)
            case "layer_unbiased":
                return LayerNorm(weight, torch.zeros_like(weight), eps, biased=False)
            case "rms_above_one":
                return GemmaRmsNorm(weight, eps)
            case _:
                return RmsNorm(weight, eps)

    def decoder_layer(self, number: int) -> DecoderLayer:
        spec = self.spec
        before, after = spec.norm_position != "after", spec.norm_position in ("after", "both")
        experts = spec.experts if spec.experts and spec.experts.layers[number] else None
        return DecoderLayer(
            attention_norm=self.norm(spec.hidden_size) if before else None,
            attention=(
                self.latent(spec.latent) if spec.latent else self.attention(spec.windows[number])
            ),
            attention_post_norm=self.norm(spec.hidden_size) if after else None,
            mlp_norm=self.norm(spec.hidden_size)
            if before and spec.norm_position != "once"
            else None,
            mlp=self.moe(experts) if experts else self.mlp(spec.intermediate_size),
            mlp_post_norm=self.norm(spec.hidden_size) if after else None,
            parallel=spec.parallel,
        )

    def attention(self, window: int) -> Attention:
        spec = self.spec
        query_size = spec.num_heads * spec.head_dim
        kv_size = spec.num_kv_heads * spec.head_dim
        q_norm, k_norm = {
            "": (None, None),
            "head": (self.norm(spec.head_dim), self.norm(spec.head_dim)),
            "whole": (self.norm(query_size), self.norm(kv_size)),
        }[spec.qk_norm]
        qkv = self.linear(spec.hidden_size, (query_size, kv_size, kv_size), spec.qkv_bias)
        qkv.row_order = self.grouped_rows() if spec.qkv_grouped else None
        sinks = self.empty(spec.num_heads) if spec.sinks else None
        return Attention(
            qkv=qkv,
            output=self.row_parallel_linear(query_size, spec.hidden_size, spec.output_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=window,
            scores=self.scores(sinks),
            rotary=(1 if window and spec.local_rope else 0) if spec.ropes else None,
            interleaved=spec.rope.interleaved,
            clip=spec.qkv_clip,
            biases=self.biases(),
        )

    def grouped_rows(self) -> Tensor:
        """Return the `row_order` of `Attention.qkv` for checkpoints with `qkv_grouped`.

        The rows of such a checkpoint are grouped: for each KV head, the query heads, the key, the
        value. `qkv` has all query heads, then all keys, then all values.
        """
        spec = self.spec
        group = spec.num_heads // spec.num_kv_heads
        rows = torch.arange(spec.num_kv_heads * (group + 2) * spec.head_dim, device=self.device)
        groups = rows.view(spec.num_kv_heads, group + 2, spec.head_dim)
        chunks = (groups[:, :group], groups[:, group], groups[:, group + 1])
        return torch.cat([chunk.flatten() for chunk in chunks])

    def scores(self, sinks: Tensor | None) -> ScoreMod:
        spec, slopes, scale = self.spec, None, self.spec.attention_scale
        if spec.alibi is not None and spec.alibi.rounded:
            scale = spec.head_dim**-0.5  # the default would use the larger head size of the cache
        elif spec.alibi is not None:
            slopes = torch.tensor(spec.alibi.slopes, dtype=torch.float32, device=self.device)
        return ScoreMod(scale, spec.attention_cap, sinks, slopes)

    def biases(self) -> CachedAlibiBias | None:
        alibi = self.spec.alibi
        if alibi is None or not alibi.rounded:
            return None
        slopes = torch.tensor(alibi.slopes, dtype=torch.bfloat16, device=self.device)
        return CachedAlibiBias(slopes, self.spec.extra_dim)

    def latent(self, latent: LatentSpec) -> LatentAttention:
        spec = self.spec
        query_size = spec.num_heads * spec.head_dim
        row_size = latent.rank + latent.rope_dim
        sizes = (latent.query_rank or query_size, row_size)
        assert spec.attention_scale is not None
        return LatentAttention(
            down=self.linear(spec.hidden_size, sizes, spec.qkv_bias),
            query_norm=self.latent_norm(latent.query_rank) if latent.query_rank else None,
            query_up=self.linear(sizes[0], (query_size,)) if latent.query_rank else None,
            row_norm=self.latent_norm(latent.rank),
            up=self.linear(latent.rank, (spec.num_heads * latent.up_dim,)),
            num_heads=spec.num_heads,
            output=self.row_parallel_linear(
                spec.num_heads * latent.value_dim, spec.hidden_size, spec.output_bias
            ),
            rope_dim=latent.rope_dim,
            interleaved=spec.rope.interleaved,
            scale=spec.attention_scale,
        )

    def latent_norm(self, size: int) -> Norm:
        return RmsNorm(self.empty(size), LATENT_NORM_EPS)

    def mlp(self, inner: int) -> Mlp:
        down = self.row_parallel_linear(inner, self.spec.hidden_size, self.spec.mlp_bias)
        return Mlp(self.gate_up(inner), down, self.activation())

    def expert_mlp(self, inner: int) -> Mlp:
        """Create an expert without all-reduce; the caller sums the ranks' partial results."""
        down = self.linear(inner, (self.spec.hidden_size,), self.spec.mlp_bias)
        return Mlp(self.gate_up(inner), down, self.activation())

    def gate_up(self, inner: int) -> Linear:
        sizes = (inner, inner) if self.spec.gated else (inner,)
        return self.linear(self.spec.hidden_size, sizes, self.spec.mlp_bias)

    def activation(self) -> Callable[[Tensor], Tensor]:
        found = (GATES if self.spec.gated else UNGATED)[self.spec.activation]
        return BATCH_INVARIANT_GATES.get(found, found) if self.deterministic else found

    def moe(self, experts: ExpertsSpec) -> MoE | ExpertParallelMoE:
        ranks, routing = self.ranks, _routing(experts)
        own = ranks.coord.experts(experts.num_experts)
        stacks = None
        if experts.clamp is None:
            mlps, together = self.expert_mlps(len(own), experts.inner_size)
        else:
            is_grouped = runs_kernels(self.device) and not self.quantized
            stacks = self.stacks(experts, len(own), is_grouped)
            mlps = _stacked_experts(stacks, *experts.clamp)
            together = _grouped_weights(stacks, *experts.clamp) if is_grouped else None
        fields: dict[str, Any] = {
            "router": self.router(experts),
            "bias": self.wide_empty(experts.num_experts) if routing.sigmoid else None,
            "routing": routing,
            "experts": mlps,
            "stacks": stacks,
            "shared": self.shared(experts) if experts.shared_size else None,
            "grouped": together,
            "batch_invariant": self.deterministic,
        }
        if ranks.stage is None:
            return MoE(**fields)
        load = torch.zeros(experts.num_experts, dtype=torch.int64, device=self.device)
        return ExpertParallelMoE(**fields, coord=ranks.coord, stage=ranks.stage, load=load)

    def shared(self, experts: ExpertsSpec) -> SharedExpert:
        gate = self.linear(self.spec.hidden_size, (1,)) if experts.shared_gate else None
        return SharedExpert(self.expert_mlp(experts.shared_size), gate)

    def expert_mlps(self, count: int, inner: int) -> tuple[tuple[Mlp, ...], ExpertWeights | None]:
        """Create the experts; return them, and the stacked weights of which they are views.

        Only a GPU has stacked weights, and only for gated experts without biases and quantization
        whose activation the kernel supports. Otherwise, None is returned for them.
        """
        spec, kind = self.spec, GATE_KINDS.get(self.spec.activation)
        is_plain = (
            spec.gated and not spec.mlp_bias and spec.quantization is None and not self.quantized
        )
        if not runs_kernels(self.device) or kind is None or not is_plain:
            return tuple(self.expert_mlp(inner) for _ in range(count)), None
        hidden, activation = spec.hidden_size, self.activation()
        gate_up, down = self.empty(count, 2 * inner, hidden), self.empty(count, hidden, inner)
        mlps = tuple(
            Mlp(Linear(first, None, (inner, inner)), Linear(second, None, (hidden,)), activation)
            for first, second in zip(gate_up, down, strict=True)
        )
        return mlps, ExpertWeights(
            gate_up.transpose(1, 2), down.transpose(1, 2), GatedActivation(kind)
        )

    def router(self, experts: ExpertsSpec) -> Linear:
        hidden, sizes = self.spec.hidden_size, (experts.num_experts,)
        if experts.routing is None:
            return self.linear(hidden, sizes, bias=experts.clamp is not None)
        return Linear(self.wide_empty(*sizes, hidden), None, sizes)

    def wide_empty(self, *shape: int) -> Tensor:
        """Create a float32 tensor for DeepSeek's routing, which is float32 for any model dtype."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def stacks(self, experts: ExpertsSpec, count: int, is_grouped: bool) -> dict[str, ExpertStack]:
        inner, hidden = experts.inner_size, self.spec.hidden_size
        # Only one rank has the bias of `down_proj`, because the sum over ranks must contain it
        # once.
        has_bias = self.ranks.coord.expert_tp_rank == 0
        return {
            "gate_up_proj": self.stack((count, hidden, 2 * inner), True, is_grouped),
            "down_proj": self.stack((count, inner, hidden), has_bias, is_grouped),
        }

    def stack(self, shape: tuple[int, int, int], has_bias: bool, is_grouped: bool) -> ExpertStack:
        """Create a projection of all experts as a stack; the linears are views of the stack."""
        count, _, size = shape
        device = torch.device("meta") if self.quantized else self.device
        weight = torch.empty(shape, dtype=self.dtype, device=device)
        bias = self.empty(count, size) if has_bias else None
        biases = [None] * count if bias is None else list(bias)
        linears = tuple(
            Linear(each, own, (size,), device=self.device)
            for each, own in zip(weight.transpose(1, 2), biases, strict=True)
        )
        return ExpertStack(weight, bias, linears, is_grouped)


def _routing(experts: ExpertsSpec) -> Routing:
    plain, found = Routing(experts.top_k, experts.normalise), experts.routing
    if found is None:
        return plain
    sigmoid = found.method == "noaux_tc"
    return replace(
        plain,
        sigmoid=sigmoid,
        num_groups=found.num_groups,
        top_groups=found.top_groups,
        group_best=2 if sigmoid else 1,
        scale=found.scale,
    )


def _grouped_weights(stacks: dict[str, ExpertStack], gain: float, limit: float) -> ExpertWeights:
    gate_up, down = stacks["gate_up_proj"], stacks["down_proj"]
    assert gate_up.weight is not None
    assert down.weight is not None
    gate = GatedActivation("clamped", gain, limit)
    # Only one rank of an expert group has the bias of `down`.
    return ExpertWeights(gate_up.weight, down.weight, gate, gate_up.bias, down.bias)


def _stacked_experts(stacks: dict[str, ExpertStack], gain: float, limit: float) -> tuple[Mlp, ...]:
    """Create the experts of gpt-oss."""
    activation = partial(swiglu_oai, gain=gain, limit=limit)
    pairs = zip(stacks["gate_up_proj"].linears, stacks["down_proj"].linears, strict=True)
    return tuple(Mlp(gate_up, down, activation) for gate_up, down in pairs)
