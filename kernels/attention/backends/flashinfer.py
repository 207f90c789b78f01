"""FlashInfer as an attention backend, with FlashInfer's wrappers for paged decode and prefill.

A wrapper's `plan` reads lengths on the host and is not part of a CUDA graph. Each sliding window
has its own wrappers. CUDA graphs use decode wrappers, one for each number of rows, and read the
buffers of these wrappers. All steps without a graph use one prefill wrapper. Penstock's cache has
the layout that FlashInfer calls "HND". The backend has not been run yet: see docs/gpu.md.
"""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention.backends.interface import (
    AttentionRequest,
    HostBatch,
    Ints,
    common_reason,
)
from penstock.kernels.attention.op import AttentionPlan
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.attention.triton_launch import Batch

MODULE = "flashinfer"

HEAD_DIMS = (64, 128, 256)

MIN_WORKSPACE_BYTES = 128 << 20
"""Smallest size of the workspace; FlashInfer's documentation recommends it."""

WORKSPACE_MARGIN_BYTES = 4 << 20
"""Bytes of the workspace in addition to the calculated size, for alignment."""

MAX_TILE_ROWS = 128
"""Largest number of query rows of a FlashInfer tile. A token has one row per query head of its KV
head."""

TENSOR_CORE_GROUP = 4
"""Decode steps use FlashInfer's tensor core kernels if a KV head has at least this number of query
heads."""


def supports(request: AttentionRequest) -> str:
    """Return the reason why FlashInfer does not support `request`, or "" if it does."""
    if reason := common_reason(request):
        return reason
    if request.capability < (8, 0):
        major, minor = request.capability
        return f"it needs sm_80 or later, not sm_{major}{minor}"
    if request.head_dim not in HEAD_DIMS:
        return f"it supports heads of 64, 128 or 256 features, not {request.head_dim}"
    return ""


def uses_tensor_cores(request: AttentionRequest) -> bool:
    """Return True if captured decode steps use FlashInfer's tensor core kernels."""
    return request.num_heads >= TENSOR_CORE_GROUP * request.num_kv_heads


def workspace_bytes(request: AttentionRequest) -> int:
    """Return the size of the workspace that all wrappers share.

    If FlashInfer splits contexts, the workspace holds `head_dim + 1` float32 values for each row of
    each tile and each query head. Decode kernels without tensor cores need only a few MiB.
    """
    # FlashInfer splits the contexts of an uncaptured step only into at most this number of tiles.
    rows = 2 * request.multiprocessors // request.num_kv_heads * MAX_TILE_ROWS
    if uses_tensor_cores(request):
        # For a graph, FlashInfer always reserves space for all tiles that the graph may have.
        group = request.num_heads // request.num_kv_heads
        tile_rows = 16 if group <= 16 else 64 if group <= 64 else MAX_TILE_ROWS
        num_tiles = -(-request.captured_rows * group // tile_rows) + request.captured_rows - 1
        rows = max(rows, num_tiles * tile_rows)
    needed = rows * request.num_heads * (request.head_dim + 1) * torch.float32.itemsize
    return max(MIN_WORKSPACE_BYTES, needed + WORKSPACE_MARGIN_BYTES)


@dataclass(frozen=True, slots=True)
class PageLists:
    """The blocks of a step's B sequences, in the form that FlashInfer expects.

    FlashInfer calls a block a page. The tensors are int32 and on the host.
    """

    starts: Tensor  # [B + 1] index in `pages` of each sequence's first page; then len(pages)
    pages: Tensor  # [starts[B]] block numbers of all sequences, one sequence after another
    last_page_lens: Tensor  # [B] number of positions in each sequence's last page, at least 1


def page_lists(context_lens: Ints, block_tables: Ints, block_size: int) -> PageLists:
    """Convert a block table to page lists. Every context length must be at least 1."""
    counts = -(-context_lens // block_size)
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    used = np.arange(block_tables.shape[1]) < counts[:, None]
    last = context_lens - (counts - 1) * block_size
    arrays = (starts, block_tables[used], last)
    return PageLists(*(torch.from_numpy(np.ascontiguousarray(each, np.int32)) for each in arrays))


class FlashInferBackend:
    """Plans FlashInfer's wrappers on the host before each step.

    Args:
        module: the module `flashinfer`.
    """

    name = "flashinfer"
    grids_follow_context = False

    def __init__(self, module: Any, request: AttentionRequest, device: torch.device) -> None:
        self._module = module
        self._request = request
        self._device = device
        self._workspace = torch.zeros(workspace_bytes(request), dtype=torch.uint8, device=device)
        self._prefill: dict[int, Any] = {}  # window -> prefill wrapper
        # (window, rows of the graph) -> decode wrapper
        self._decode: dict[tuple[int, int], Any] = {}
        # window -> wrapper that is planned for the prepared step
        self._current: dict[int, Any] = {}
        # id of a wrapper -> event recorded after the copy of the wrapper's last plan to the device
        self._copied: dict[int, torch.cuda.Event] = {}

    @classmethod
    def of(cls, request: AttentionRequest, device: torch.device) -> "FlashInferBackend":
        return cls(import_module(MODULE), request, device)

    def prepare(self, batch: HostBatch) -> None:
        lists = page_lists(batch.context_lens, batch.block_tables, self._request.block_size)
        for window in sorted(set(self._request.windows)):
            if batch.is_captured:
                wrapper = self._decode_wrapper(window, batch)
            else:
                wrapper = self._prefill_wrapper(window)
            self._wait_for_last_plan(wrapper)
            self._plan_wrapper(wrapper, window, batch, lists)
            self._current[window] = wrapper

    def plan(
        self,
        batch: Batch,
        layer: Tensor,
        max_query: int,
        max_context: int,
        window: int,
    ) -> AttentionPlan:
        return AttentionPlan(_Plan(self._current[window]), layer, "T")

    def _plan_wrapper(self, wrapper: Any, window: int, batch: HostBatch, lists: PageLists) -> None:
        request = self._request
        heads = (request.num_heads, request.num_kv_heads, request.head_dim, request.block_size)
        pages = (lists.starts, lists.pages, lists.last_page_lens)
        dtype = getattr(torch, request.dtype)
        options: dict[str, Any] = {
            "window_left": window - 1 if window else -1,
            "logits_soft_cap": request.cap or None,
            "q_data_type": dtype,
            "kv_data_type": dtype,
            "sm_scale": request.scale or request.head_dim**-0.5,
        }
        if batch.is_captured:
            wrapper.plan(*pages, *heads, **options)
        else:
            starts = torch.from_numpy(np.ascontiguousarray(batch.query_starts, np.int32))
            wrapper.plan(starts, *pages, *heads, causal=True, **options)
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
            self._copied[id(wrapper)] = event

    def _wait_for_last_plan(self, wrapper: Any) -> None:
        """Wait until the device has copied the last plan from the wrapper's pinned memory.

        Without this wait, a new plan could overwrite the last plan too early. The wait is short,
        because the device copies a plan before it runs the plan's step.
        """
        event = self._copied.get(id(wrapper))
        if event is not None:
            event.synchronize()

    def _prefill_wrapper(self, window: int) -> Any:
        wrapper = self._prefill.get(window)
        if wrapper is None:
            kind = self._module.BatchPrefillWithPagedKVCacheWrapper
            wrapper = self._prefill[window] = kind(self._workspace, "HND")
        return wrapper

    def _decode_wrapper(self, window: int, batch: HostBatch) -> Any:
        """Return the decode wrapper for CUDA graphs with the number of rows of `batch`.

        The first call creates the wrapper, with buffers for the blocks of `batch`. The blocks of
        later steps fit into these buffers, because the first step has the widest block table.
        """
        num_rows, num_columns = batch.block_tables.shape
        wrapper = self._decode.get((window, num_rows))
        if wrapper is None:
            request = self._request
            sizes = (num_rows + 1, num_rows * num_columns, num_rows)
            starts, pages, last = (
                torch.zeros(size, dtype=torch.int32, device=self._device) for size in sizes
            )
            wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "HND",
                use_cuda_graph=True,
                use_tensor_cores=uses_tensor_cores(request),
                paged_kv_indptr_buffer=starts,
                paged_kv_indices_buffer=pages,
                paged_kv_last_page_len_buffer=last,
            )
            self._decode[window, num_rows] = wrapper
        return wrapper


@dataclass(frozen=True, slots=True)
class _Plan:
    wrapper: Any  # FlashInfer wrapper that was planned for this step

    def attend(self, query: Tensor, layer: Tensor, scores: ScoreMod) -> Tensor:
        out: Tensor = self.wrapper.run(query, (layer[0], layer[1]))
        return out
