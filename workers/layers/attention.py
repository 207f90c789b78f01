"""Self-attention over the paged KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.attention.cpu_plan import CpuPagedPlan
from penstock.kernels.attention.op import AttentionPlan, paged_attention
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.kv_cache.op import rope_and_cache, write_kv
from penstock.kernels.mla.op import MlaPlan
from penstock.kernels.step_graph.builder import AttentionParams, GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.layout import Buffer
from penstock.workers.layers.cached_alibi import CachedAlibiBias
from penstock.workers.layers.linear import Linear, RowParallelLinear
from penstock.workers.layers.norm import Norm


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs that all layers share in one step of T tokens; the model runner builds them."""

    positions: Tensor  # [T]
    # for each rotary table, the rows (cosines and sines) of the T tokens, [T, 2, R]
    cos_sin: tuple[Tensor, ...]
    cache_rows: Tensor  # cache rows for the step's keys and values, from `slot_rows`
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
    interleaved: bool  # rotary pairs: adjacent features if True, half a head apart if False
    clip: float  # queries, keys and values are clamped to [-clip, clip]; 0: no clamp
    # Adds rounded ALiBi biases (Falcon). None: the model has no rounded biases.
    biases: CachedAlibiBias | None

    def __call__(self, x: Tensor, step: StepInputs, layer: Tensor) -> Tensor:
        """Write the tokens' keys and values to the cache, and compute attention.

        Args:
            x: [T, hidden].
            step: inputs that all layers share.
            layer: this layer's cache, [2, N, H, S, W]; updated in place. Its slots have `head_dim`
                features, plus `biases.num_features` if `biases` is set.

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

    def lower(
        self, graph: GraphBuilder, x: Buffer, angles: Sequence[Buffer], layer: int, out: Buffer
    ) -> None:
        """Append `out = self(x)` to a CPU step graph.

        Args:
            angles: for each rotary table, cosines and sines of the tokens' positions.
            layer: number of this layer in the KV cache.
        """
        if self.clip or self.biases is not None:
            raise UnsupportedGraph(
                "the CPU step graph does not support clamped queries, keys and values, or "
                "rounded ALiBi biases"
            )
        dim, num_heads, num_kv_heads = self.head_dim, self.num_heads, self.num_kv_heads
        heads = graph.scratch("heads", (num_heads + 2 * num_kv_heads) * dim)
        self.qkv.lower(graph, x, heads)
        if self.q_norm is not None and self.k_norm is not None:
            first_key = num_heads * dim
            self.q_norm.lower(graph, heads, heads, range(first_key))
            self.k_norm.lower(graph, heads, heads, range(first_key, first_key + num_kv_heads * dim))
        params = AttentionParams(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=dim,
            angles=None if self.rotary is None else angles[self.rotary],
            interleaved=self.interleaved,
            window=self.window,
            scores=self.scores,
        )
        attended = graph.scratch("attended", num_heads * dim)
        graph.attend(heads, params, layer, attended)
        self.output.lower(graph, attended, out)

    def _normalise(self, heads: Tensor, norm: Norm) -> None:
        """Normalise `heads` in place, in groups as wide as the weight.

        A group is one head, or all heads together.
        """
        norm.normalize_(heads.view(len(heads), -1, norm.weight.shape[0]))
