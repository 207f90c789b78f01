"""FlashAttention-3 as an attention backend: `flash_attn_with_kvcache` of `flash_attn_interface`.

The function reads lengths and block tables from the device, so a CUDA graph can capture the call.
The function expects a cache with the shape [pages, page size, heads, D], and allows any strides of
the first three dimensions. This backend therefore passes a transposed view of Penstock's cache.
The backend has not been run yet: see docs/gpu.md.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.attention.backends.interface import (
    AttentionRequest,
    HostBatch,
    common_reason,
)
from penstock.kernels.attention.op import AttentionPlan, check_device_batch
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.attention.triton_launch import Batch

MODULE = "flash_attn_interface"


def supports(request: AttentionRequest) -> str:
    """Return the reason why FlashAttention-3 does not support `request`, or "" if it does."""
    if reason := common_reason(request):
        return reason
    if request.capability[0] != 9:
        major, minor = request.capability
        return f"it needs a Hopper GPU (sm_90), not sm_{major}{minor}"
    if request.head_dim > 256 or request.head_dim % 8:
        return (
            f"it supports heads with a multiple of 8 features, at most 256, not {request.head_dim}"
        )
    return ""


@dataclass(frozen=True, slots=True)
class FlashAttentionBackend:
    """Calls FlashAttention-3 once per layer. Its `prepare` does nothing."""

    function: Any  # FlashAttention's function `flash_attn_with_kvcache`
    request: AttentionRequest
    name: str = "fa3"
    grids_follow_context: bool = True

    @classmethod
    def of(cls, request: AttentionRequest, device: torch.device) -> "FlashAttentionBackend":
        return cls(import_module(MODULE).flash_attn_with_kvcache, request)

    def prepare(self, batch: HostBatch) -> None:
        pass

    def plan(
        self,
        batch: Batch,
        layer: Tensor,
        max_query: int,
        max_context: int,
        window: int,
    ) -> AttentionPlan:
        check_device_batch(batch, layer, max_context)
        num_blocks = -(-max_context // layer.shape[3])
        # Drop unused columns of the block table, because the grid of a captured graph grows with
        # the number of columns.
        narrow = Batch(batch.query_starts, batch.context_lens, batch.tables[:, :num_blocks])
        return AttentionPlan(_Plan(self.function, narrow, max_query, window), layer, "T")


@dataclass(frozen=True, slots=True)
class _Plan:
    function: Any
    batch: Batch
    max_query: int
    window: int

    def attend(self, query: Tensor, layer: Tensor, scores: ScoreMod) -> Tensor:
        keys, values = (side.transpose(1, 2) for side in layer)
        left = self.window - 1 if self.window else -1
        out: Tensor = self.function(
            query,
            keys,
            values,
            cache_seqlens=self.batch.context_lens,
            page_table=self.batch.tables,
            cu_seqlens_q=self.batch.query_starts,
            max_seqlen_q=self.max_query,
            softmax_scale=scores.scale or query.shape[2] ** -0.5,
            causal=True,
            window_size=(left, 0 if self.window else -1),
            softcap=scores.cap,
        )
        return out
