"""Blocks built as a `ModelSpec` says, their weights yet to be loaded."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.activation import (
    clamped_silu_mul,
    gelu,
    gelu_mul,
    silu_mul,
    silu_mul_alike,
)
from penstock.kernels.experts import Gate, Stacks
from penstock.kernels.routing import Routing
from penstock.kernels.scores import Scores
from penstock.workers.layers.attention import Attention
from penstock.workers.layers.block import Block
from penstock.workers.layers.experts import Experts, SharedExpert
from penstock.workers.layers.latent import LatentAttention
from penstock.workers.layers.linear import Linear, empty_linear
from penstock.workers.layers.mlp import Mlp
from penstock.workers.layers.norm import LayerNorm, Norm, RmsNorm, RmsNormAboveOne
from penstock.workers.models.deepseek import LatentSpec
from penstock.workers.models.spec import ExpertsSpec, ModelSpec

GATES: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu_mul, "gelu_pytorch_tanh": gelu_mul}
GATE_KINDS: dict[str, Literal["silu", "gelu"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_new": gelu,
}
"""Activations, without a gate."""

LATENT_NORM_EPS = 1e-6  # whatever the configuration says of the others


@dataclass(frozen=True, slots=True)
class Assembly:
    """Makes the parts of one model in one place."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    deterministic: bool = False

    def empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def linear(self, num_inputs: int, sizes: tuple[int, ...], bias: bool = False) -> Linear:
        return empty_linear(num_inputs, sizes, bias, self.dtype, self.device)

    def norm(self, size: int) -> Norm:
        weight, eps = self.empty(size), self.spec.norm_eps
        match self.spec.norm_kind:
            case "layer":
                return LayerNorm(weight, self.empty(size), eps)
            case "rms_above_one":
                return RmsNormAboveOne(weight, eps)
            case _:
                return RmsNorm(weight, eps)

    def block(self, number: int) -> Block:
        spec = self.spec
        before, after = spec.norm_place != "after", spec.norm_place in ("after", "both")
        experts = spec.experts if spec.experts and spec.experts.layers[number] else None
        return Block(
            attention_norm=self.norm(spec.hidden_size) if before else None,
            attention=(
                self.latent(spec.latent) if spec.latent else self.attention(spec.windows[number])
            ),
            attention_post_norm=self.norm(spec.hidden_size) if after else None,
            mlp_norm=self.norm(spec.hidden_size) if before and spec.norm_place != "once" else None,
            mlp=self.experts(experts) if experts else self.mlp(spec.intermediate_size),
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
        sinks = self.empty(spec.num_heads) if spec.sinks else None
        return Attention(
            qkv=self.linear(spec.hidden_size, (query_size, kv_size, kv_size), spec.qkv_bias),
            output=self.linear(query_size, (spec.hidden_size,), spec.output_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            window=window,
            scores=Scores(spec.attention_scale, spec.attention_cap, sinks),
            rotary=1 if window and spec.local_rope else 0,
            neighbours=spec.rope.neighbours,
        )

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
            up=self.empty(spec.num_heads, latent.up_dim, latent.rank),
            output=self.linear(
                spec.num_heads * latent.value_dim, (spec.hidden_size,), spec.output_bias
            ),
            rope_dim=latent.rope_dim,
            neighbours=spec.rope.neighbours,
            scale=spec.attention_scale,
        )

    def latent_norm(self, size: int) -> Norm:
        return RmsNorm(self.empty(size), LATENT_NORM_EPS)

    def mlp(self, inner: int) -> Mlp:
        spec, hidden, bias = self.spec, self.spec.hidden_size, self.spec.mlp_bias
        return Mlp(
            gate_up=self.linear(hidden, (inner, inner) if spec.gated else (inner,), bias),
            down=self.linear(inner, (hidden,), bias),
            activation=self.activation(),
        )

    def activation(self) -> Callable[[Tensor], Tensor]:
        found = (GATES if self.spec.gated else PLAIN)[self.spec.activation]
        return silu_mul_alike if self.deterministic and found is silu_mul else found

    def experts(self, experts: ExpertsSpec) -> Experts:
        hidden, routing = self.spec.hidden_size, _routing(experts)
        shared = None
        if experts.shared_size:
            gate = self.linear(hidden, (1,)) if experts.shared_gate else None
            shared = SharedExpert(self.mlp(experts.shared_size), gate)
        if experts.clamp is None:
            stacks = None
            mlps, together = self.expert_mlps(experts)
        else:
            stacks = self.stacks(experts)
            mlps = _unstacked(stacks, *experts.clamp)
            together = _together(stacks, *experts.clamp) if self.device.type == "cuda" else None
        return Experts(
            router=self.router(experts),
            bias=self.wide_empty(experts.num_experts) if routing.sigmoid else None,
            routing=routing,
            experts=mlps,
            stacks=stacks,
            shared=shared,
            together=together,
        )

    def expert_mlps(self, experts: ExpertsSpec) -> tuple[tuple[Mlp, ...], Stacks | None]:
        """On a GPU their weights lie in one tensor, as the product of all of them reads it."""
        spec, count, inner = self.spec, experts.num_experts, experts.inner_size
        kind = GATE_KINDS.get(spec.activation)
        if self.device.type != "cuda" or kind is None or spec.mlp_bias or not spec.gated:
            return tuple(self.mlp(inner) for _ in range(count)), None
        hidden, activation = spec.hidden_size, GATES[spec.activation]
        gate_up, down = self.empty(count, 2 * inner, hidden), self.empty(count, hidden, inner)
        mlps = tuple(
            Mlp(Linear(first, None, (inner, inner)), Linear(second, None, (hidden,)), activation)
            for first, second in zip(gate_up, down, strict=True)
        )
        return mlps, Stacks(gate_up.transpose(1, 2), down.transpose(1, 2), Gate(kind))

    def router(self, experts: ExpertsSpec) -> Linear:
        hidden, sizes = self.spec.hidden_size, (experts.num_experts,)
        if experts.routing is None:
            return self.linear(hidden, sizes, bias=experts.clamp is not None)
        return Linear(self.wide_empty(*sizes, hidden), None, sizes)

    def wide_empty(self, *shape: int) -> Tensor:
        """In float32, as DeepSeek's routing is, whatever the rest is in."""
        return torch.empty(shape, dtype=torch.float32, device=self.device)

    def stacks(self, experts: ExpertsSpec) -> dict[str, Tensor]:
        count, inner, hidden = experts.num_experts, experts.inner_size, self.spec.hidden_size
        return {
            "gate_up_proj": self.empty(count, hidden, 2 * inner),
            "gate_up_proj_bias": self.empty(count, 2 * inner),
            "down_proj": self.empty(count, inner, hidden),
            "down_proj_bias": self.empty(count, hidden),
        }


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


def _together(stacks: dict[str, Tensor], gain: float, limit: float) -> Stacks:
    return Stacks(
        stacks["gate_up_proj"],
        stacks["down_proj"],
        Gate("clamped", gain, limit),
        stacks["gate_up_proj_bias"],
        stacks["down_proj_bias"],
    )


def _unstacked(stacks: dict[str, Tensor], gain: float, limit: float) -> tuple[Mlp, ...]:
    """Experts whose weights are views of the stacks."""
    activation = partial(clamped_silu_mul, gain=gain, limit=limit)

    def linears(name: str) -> list[Linear]:
        weights, biases = stacks[name].transpose(1, 2), stacks[f"{name}_bias"]
        return [Linear(w, b, (len(b),)) for w, b in zip(weights, biases, strict=True)]

    pairs = zip(linears("gate_up_proj"), linears("down_proj"), strict=True)
    return tuple(Mlp(gate_up, down, activation) for gate_up, down in pairs)
