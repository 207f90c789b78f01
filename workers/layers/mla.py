"""Multi-head latent attention (MLA, DeepSeek): self-attention over a cache of compressed rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.attention.cpu_plan import CpuPagedPlan
from penstock.kernels.kv_cache.op import write_kv
from penstock.kernels.linear.op import PackedLinear, pack_batch_invariant
from penstock.kernels.mla.cpu import mla_attention_cpu
from penstock.kernels.mla.op import MlaPlan, mla_attention
from penstock.kernels.rope.op import rotate_
from penstock.kernels.step_graph.builder import GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.layout import Buffer
from penstock.kernels.triton_common.launch import runs_kernels
from penstock.workers.layers.attention import StepInputs
from penstock.workers.layers.linear import Linear, RowParallelLinear
from penstock.workers.layers.norm import Norm


@dataclass(slots=True, eq=False)
class LatentAttention:
    """MLA of one layer.

    A query head has Q plain features, followed by P features with rotary embedding. A cache row has
    R compressed features, followed by P features with rotary embedding, for all heads together.
    """

    # Projects x. The first outputs are the query's latent, or all query heads if `query_up` is
    # None. The other R + P outputs are a cache row.
    down: Linear
    query_norm: Norm | None
    query_up: Linear | None
    row_norm: Norm  # normalises the first R features of a cache row
    # maps R features to the Q key and V value features of all heads; never packed, see `up_heads`
    up: Linear
    num_heads: int  # H
    output: Linear | RowParallelLinear
    rope_dim: int  # P
    # rotary pairs: adjacent features if True, features P / 2 apart if False
    interleaved: bool
    scale: float
    packed_up: tuple[list[PackedLinear], list[PackedLinear]] | None = (
        # The key part and the value part of `up`, each as one layer per head; passed to
        # `mla_attention_cpu`.
        None
    )

    @property
    def up_heads(self) -> Tensor:
        """The weights of `up` by head, [H, Q + V, R]; the key part is used transposed."""
        return self.up.weight.view(self.num_heads, -1, self.up.weight.shape[1])

    def pack_batch_invariant(self) -> None:
        """Pack `up` for batch-invariant results on a CPU; do nothing on a GPU.

        On a GPU, the attention plan of the step makes the results batch-invariant.
        """
        up = self.up_heads
        if runs_kernels(up.device):
            return
        output = self.output.linear if isinstance(self.output, RowParallelLinear) else self.output
        value_dim = output.weight.shape[1] // len(up)
        keys, values = up[:, :-value_dim], up[:, -value_dim:]
        self.packed_up = (
            [pack_batch_invariant(each.T, None) for each in keys],
            [pack_batch_invariant(each, None) for each in values],
        )

    def __call__(self, x: Tensor, step: StepInputs, layer: Tensor) -> Tensor:
        """Write the tokens' compressed rows to the cache, and compute attention.

        Args:
            x: [T, hidden].
            step: inputs that all layers share.
            layer: this layer's cache, [1, N, 1, S, R + P]; updated in place.

        Returns:
            [T, hidden].
        """
        query, row = torch.split(self.down(x), list(self.down.sizes), dim=-1)
        if self.query_up is not None and self.query_norm is not None:
            query = self.query_up(self.query_norm(query))
        heads = query.view(len(x), self.num_heads, -1)
        cos_sin = step.cos_sin[0]
        rotate_(heads[:, :, -self.rope_dim :], cos_sin, self.interleaved)
        self.row_norm.normalize_(row[:, : self.up.weight.shape[1]])
        rotate_(row[:, None, -self.rope_dim :], cos_sin, self.interleaved)
        write_kv(layer, step.cache_rows, row[:, None])
        return self.output(self._attend(heads, step, layer).flatten(1))

    def lower(
        self, graph: GraphBuilder, x: Buffer, angles: Sequence[Buffer], layer: int, out: Buffer
    ) -> None:
        raise UnsupportedGraph("the CPU step graph does not support multi-head latent attention")

    def _attend(self, heads: Tensor, step: StepInputs, layer: Tensor) -> Tensor:
        if self.packed_up is not None:
            assert isinstance(step.latent, CpuPagedPlan)
            rank = self.up.weight.shape[1]
            return mla_attention_cpu(heads, layer, rank, *self.packed_up, step.latent, self.scale)
        assert isinstance(step.latent, MlaPlan)
        return mla_attention(heads, layer, self.up_heads, step.latent, self.scale)
