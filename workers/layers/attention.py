"""Self-attention over the paged KV cache."""

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
    """Inputs that all layers share in one step of T tokens; the model runner builds them."""

    positions: Tensor  # [T]
    cos_sin: tuple[Tensor, ...]  # per rotary table: the rows for the T tokens, [T, 2, R]
    cache_rows: Tensor  # result of `slot_rows`: cache rows for this step's keys and values
    plans: dict[int, AttentionPlan]  # attention plan per window size; empty for MLA
    latent: MlaPlan | CpuPagedPlan | None  # attention plan for MLA; None for other attention


@dataclass(frozen=True, slots=True)
class Attention:
    """Multi-head or grouped-query self-attention of one layer, including the projections."""

    qkv: Linear
    output: Linear | RowParallelLinear
    q_norm: Norm | None
    k_norm: Norm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    scores: ScoreMod
    rotary: int | None  # index of the rotary table; None: no rotary embedding
    interleaved: bool  # rotary pairs are adjacent features; False: features half a head apart
    clip: float  # queries, keys and values are clamped to [-clip, clip]; 0: no clamp
    biases: CachedAlibiBias | None  # for rounded ALiBi biases (Falcon), otherwise None

    def __call__(self, x: Tensor, step: StepInputs, layer: Tensor) -> Tensor:
        """Write the tokens' keys and values to the cache, and compute attention.

        Args:
            x: [T, hidden].
            step: inputs that all layers share.
            layer: this layer's cache, [2, N, H, S, D]; updated in place. D is `head_dim`, plus
                `biases.num_features` if `biases` is set.

        Returns:
            [T, hidden].
        """
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
        """Reorder the rows of `qkv` in place; call once after loading.

        In the checkpoint, each KV head's query heads, key and value follow each other. `qkv` needs
        all query heads, then all keys, then all values.
        """
        group = self.num_heads // self.num_kv_heads
        for rows in (self.qkv.weight, self.qkv.bias):
            if rows is not None and rows.device.type != "meta":
                groups = rows.clone().view(self.num_kv_heads, group + 2, self.head_dim, -1)
                chunks = (groups[:, :group], groups[:, group], groups[:, group + 1])
                rows.copy_(torch.cat([chunk.reshape(-1, *rows.shape[1:]) for chunk in chunks]))

    def _normalise(self, heads: Tensor, norm: Norm) -> None:
        """Normalise `heads` in place, per head or over all heads; the weight's size decides."""
        norm.normalize_(heads.view(len(heads), -1, norm.weight.shape[0]))
