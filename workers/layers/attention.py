"""Self-attention over the paged cache."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.attention.cpu_plan import CpuPagedPlan
from penstock.kernels.attention.op import AttentionPlan, paged_attention
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.kv_cache.op import rope_and_cache, write_kv
from penstock.kernels.mla.op import MlaPlan
from penstock.workers.layers.cached_alibi import CachedAlibiBias
from penstock.workers.layers.linear import Linear, RowParallelLinear
from penstock.workers.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the layers share of one step: T tokens. The runner makes it once a step."""

    positions: Tensor  # [T]
    cos_sin: tuple[Tensor, ...]  # [T, 2, R] rows of each rotary table
    cache_rows: Tensor  # of `slot_rows`: where this step's keys and values go
    plans: dict[int, AttentionPlan]  # by window; none where attention is latent
    latent: MlaPlan | CpuPagedPlan | None  # where it is


@dataclass(frozen=True, slots=True)
class Attention:
    qkv: Linear
    output: Linear | RowParallelLinear
    q_norm: Norm | None
    k_norm: Norm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    scores: ScoreMod
    rotary: int | None  # which of the rotary tables; None: no head turns
    interleaved: bool  # whether the pairs that turn are neighbours
    clip: float  # of queries, keys and values; 0: none
    biases: CachedAlibiBias | None  # of scores, where they are rounded

    def __call__(self, x: Tensor, step: StepInputs, layer: Tensor) -> Tensor:
        """x: [T, hidden]; layer: this layer's cache, [2, N, H, S, D], which is written.
        (D is `head_dim`, and more where biases are kept.)"""
        heads = self.qkv(x).view(len(x), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        if self.clip:
            heads.clamp_(-self.clip, self.clip)
        query = heads[:, : self.num_heads]
        if self.q_norm is not None and self.k_norm is not None:
            keys = heads[:, self.num_heads : self.num_heads + self.num_kv_heads]
            self._normalise(query, self.q_norm)
            self._normalise(keys, self.k_norm)
        if self.biases is not None:
            heads = self.biases.append(heads, step.positions)
            query = heads[:, : self.num_heads]
        rows = step.cache_rows
        if self.rotary is None:
            write_kv(layer, rows, heads[:, self.num_heads :])
        else:
            cos_sin = step.cos_sin[self.rotary]
            rope_and_cache(heads, self.num_heads, cos_sin, rows, layer, self.interleaved)
        out = paged_attention(query, layer, step.plans[self.window], self.scores)
        return self.output(out[:, :, : self.head_dim].flatten(1))

    def ungroup(self) -> None:
        """In place, once: rows of `qkv` that were loaded by group, each KV head's query heads
        before its key and value, become all query heads, then all keys, then all values."""
        group = self.num_heads // self.num_kv_heads
        for rows in (self.qkv.weight, self.qkv.bias):
            if rows is not None and rows.device.type != "meta":
                groups = rows.clone().view(self.num_kv_heads, group + 2, self.head_dim, -1)
                chunks = (groups[:, :group], groups[:, group], groups[:, group + 1])
                rows.copy_(torch.cat([chunk.reshape(-1, *rows.shape[1:]) for chunk in chunks]))

    def _normalise(self, heads: Tensor, norm: Norm) -> None:
        """In place, head by head or all heads together, as long as the norm's weight is."""
        norm.normalize_(heads.view(len(heads), -1, norm.weight.shape[0]))
