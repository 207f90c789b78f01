"""Multi-head latent attention (MLA, DeepSeek): self-attention over a cache of compressed rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.attention.cpu_plan import CpuPagedPlan
from penstock.kernels.kv_cache.op import write_kv
from penstock.kernels.linear.op import PackedLinear, pack_batch_invariant
from penstock.kernels.mla.cpu import mla_attention_cpu
from penstock.kernels.mla.op import MlaPlan, mla_attention
from penstock.kernels.rope.op import rotate_
from penstock.kernels.triton_common.launch import runs_kernels
from penstock.workers.layers.attention import StepInputs
from penstock.workers.layers.linear import Linear, RowParallelLinear
from penstock.workers.layers.norm import Norm


@dataclass(slots=True, eq=False)
class LatentAttention:
    """MLA of one layer.

    A query head has Q plain features and then P rotated ones. A cache row has R compressed features
    and then P rotated ones, shared by all heads.
    """

    down: Linear  # to the query's latent (all query heads if `query_up` is None), and to R + P
    query_norm: Norm | None
    query_up: Linear | None
    row_norm: Norm  # of a row's first R features
    up: Tensor  # [H, Q + V, R]: makes a head's Q key and V value features from R
    output: Linear | RowParallelLinear
    rope_dim: int  # P
    interleaved: bool  # rotary pairs are adjacent features instead of half of P apart
    scale: float
    packed_up: tuple[list[PackedLinear], list[PackedLinear]] | None = (
        None  # parts of `up` for keys and values, per head, as `mla_attention_cpu` takes them
    )

    def pack_batch_invariant(self) -> None:
        """Pack `up` for batch-invariant results on a CPU. Triton kernels follow the step's plan."""
        if runs_kernels(self.up.device):
            return
        output = self.output.linear if isinstance(self.output, RowParallelLinear) else self.output
        value_dim = output.weight.shape[1] // len(self.up)
        keys, values = self.up[:, :-value_dim], self.up[:, -value_dim:]
        self.packed_up = (
            [pack_batch_invariant(each.T, None) for each in keys],
            [pack_batch_invariant(each, None) for each in values],
        )

    def __call__(self, x: Tensor, step: StepInputs, layer: Tensor) -> Tensor:
        """Write the tokens' rows to the cache and attend.

        Args:
            x: [T, hidden].
            layer: This layer's cache, [1, N, 1, S, R + P]; updated in place.

        Returns:
            [T, hidden].
        """
        query, row = torch.split(self.down(x), list(self.down.sizes), dim=-1)
        if self.query_up is not None and self.query_norm is not None:
            query = self.query_up(self.query_norm(query))
        heads = query.view(len(x), len(self.up), -1)
        cos_sin = step.cos_sin[0]
        rotate_(heads[:, :, -self.rope_dim :], cos_sin, self.interleaved)
        self.row_norm.normalize_(row[:, : self.up.shape[2]])
        rotate_(row[:, None, -self.rope_dim :], cos_sin, self.interleaved)
        write_kv(layer, step.cache_rows, row[:, None])
        return self.output(self._attend(heads, step, layer).flatten(1))

    def _attend(self, heads: Tensor, step: StepInputs, layer: Tensor) -> Tensor:
        if self.packed_up is not None:
            assert isinstance(step.latent, CpuPagedPlan)
            rank = self.up.shape[2]
            return mla_attention_cpu(heads, layer, rank, *self.packed_up, step.latent, self.scale)
        assert isinstance(step.latent, MlaPlan)
        return mla_attention(heads, layer, self.up, step.latent, self.scale)
