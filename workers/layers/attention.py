"""Self-attention over the paged cache."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.attention import AttentionPlan, paged_attention
from penstock.kernels.cache import write_kv
from penstock.kernels.rotary import rotate_
from penstock.workers.layers.linear import Linear
from penstock.workers.layers.norm import RmsNorm


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the layers share of one step: T tokens. The runner makes it once a step."""

    cos_sin: Tensor  # [T, 2, D] rows of the rotary table
    cache_rows: Tensor  # [T, 2 H] where this step's keys and values go
    plans: dict[int, AttentionPlan]  # by window


@dataclass(frozen=True, slots=True)
class Attention:
    qkv: Linear
    output: Linear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int

    def __call__(self, x: Tensor, step: StepInputs, layer: Tensor) -> Tensor:
        """x: [T, hidden]; layer: this layer's cache, [2, N, H, S, D], which is written."""
        heads = self.qkv(x).view(len(x), self.num_heads + 2 * self.num_kv_heads, self.head_dim)
        query, kv = heads[:, : self.num_heads], heads[:, self.num_heads :]
        if self.q_norm is not None and self.k_norm is not None:
            keys = kv[:, : self.num_kv_heads]
            query.copy_(self.q_norm(query))
            keys.copy_(self.k_norm(keys))
        rotate_(heads[:, : self.num_heads + self.num_kv_heads], step.cos_sin)
        write_kv(layer, step.cache_rows, kv)
        out = paged_attention(query, layer, step.plans[self.window])
        return self.output(out.flatten(1))
