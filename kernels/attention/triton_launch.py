"""Launches the Triton kernels of paged attention for one layer.

See `attention/triton` for the letters of shapes.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.attention import work_items
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.attention.triton import attend_kernel, merge_kernel
from penstock.kernels.attention.triton_configs import Tiles
from penstock.kernels.attention.work_items import WorkShape
from penstock.kernels.checks import E4M3
from penstock.kernels.kv_cache.format import format_of
from penstock.kernels.triton_common.launch import device_info, launch, power_of_2

PARTITIONS_PER_MERGE = 32
"""Number of partitions that `merge_kernel` merges per iteration."""


class Batch(NamedTuple):
    """Offsets, lengths and block tables of a batch: int32 tensors on the device."""

    query_starts: Tensor  # [B + 1] first query row of each sequence, then the number of query rows
    context_lens: Tensor  # [B] context length of each sequence
    tables: Tensor  # [B, M] block tables


class DeviceWork(NamedTuple):
    """The arrays of a step's work items (`StepWork`), copied to the device."""

    few: Tensor
    worker_starts: Tensor
    chunks: Tensor
    merges: Tensor


@dataclass(frozen=True, slots=True)
class Prefix:
    """Arguments of the launch that attends to a shared prefix once for the whole batch.

    The launch treats all tokens of the batch as one sequence that follows the prefix.
    """

    batch: Batch
    items: Tensor  # [I, 5] work items, with the columns that `StepWork` describes
    num_partitions: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Work items and tiles of one step, for one shape of the query."""

    shape: WorkShape
    few_tiles: Tiles
    chunk_tiles: Tiles
    work: DeviceWork
    in_order: bool  # the same as in `StepWork`
    merge_tokens: int
    # Number of rows of partial results, without those of the shared prefix. For a captured graph,
    # the largest number of all its steps.
    num_partial_rows: int
    prefix: Prefix | None


def padded(head_dim: int) -> int:
    """Return the padded head size: a power of two, and at least 16, as `tl.dot` requires."""
    return max(16, power_of_2(head_dim))


@dataclass(frozen=True, slots=True)
class Partials:
    """Partial results of partitions, which `merge_kernel` merges."""

    sums: Tensor  # [P, Hq, D] float32 unnormalized sums of values
    weights: Tensor  # [P, Hq, 2] float32 maximum score and sum of exponentials


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Arguments of one layer's kernel launches."""

    query: Tensor
    layer: Tensor
    scores: ScoreMod
    out: Tensor
    window: int
    tail: int
    one_path: bool

    def run(self, batch: Batch, layout: Layout) -> None:
        """Launch all kernels of a step."""
        num_tokens, num_heads, head_dim = self.out.shape
        prefix, work = layout.prefix, layout.work
        num_shared = prefix.num_partitions if prefix else 0
        # Allocate at least one row, so that steps without partial results need no other kernel.
        size = max(1, layout.num_partial_rows + num_shared * num_tokens)
        device = self.query.device
        partials = Partials(
            torch.empty(size, num_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(size, num_heads, 2, dtype=torch.float32, device=device),
        )
        if prefix is not None:
            self.items(prefix.batch, prefix.items, layout.chunk_tiles, partials)
        if layout.in_order:
            self.items(batch, work.chunks, layout.chunk_tiles, None)
        else:
            self.items(batch, work.chunks, layout.chunk_tiles, partials)
        if len(work.few):
            self.items(batch, work.few, layout.few_tiles, partials, work.worker_starts)
        if layout.merge_tokens:
            self.merge(batch, layout, partials, num_shared)

    def items(
        self,
        batch: Batch,
        items: Tensor,
        tiles: Tiles,
        partials: Partials | None,
        worker_starts: Tensor | None = None,
    ) -> None:
        """Launch `attend_kernel` with one program per work item and KV head.

        With `worker_starts`, there is one program per worker and KV head instead. Without
        `partials`, an item computes all partitions of its rows in order.
        """
        _, _, head_dim = self.out.shape
        _, _, num_kv_heads, block_size, slot = self.layer.shape
        if not len(items):
            return
        form, layer = format_of(self.layer.dtype), self.layer
        # If the chip cannot convert float8_e4m3fn, the kernel reads the codes as uint8.
        soft = layer.dtype == E4M3 and not device_info(layer).converts_e4m3
        scores, persistent = self.scores, worker_starts is not None
        num_programs = len(items) if worker_starts is None else len(worker_starts) - 1
        launch(
            attend_kernel, (num_programs, num_kv_heads),
            self.query, layer.view(torch.uint8) if soft else layer,
            batch.tables, batch.query_starts, batch.context_lens,
            items, worker_starts, self.out,
            partials.sums if partials else None, partials.weights if partials else None,
            scores.sinks, scores.slopes,
            layer.view(-1).view(torch.float16) if form.has_scales else None,
            self.query.stride(0), batch.tables.stride(0), layer.stride(0),
            head_dim**-0.5 if scores.scale is None else scores.scale, scores.cap or None,
            H=num_kv_heads, G=self.out.shape[1] // num_kv_heads, S=block_size, D=head_dim,
            TAIL=self.tail, PAGE=block_size * slot, UNIT=256.0 if soft else 1.0,
            GAIN=form.value_gain, WINDOW=self.window,
            SPLIT=0 if partials else work_items.SPLIT,
            SHORT=persistent or partials is None or self.tail > 0, PERSISTENT=persistent,
            BLOCK_M=tiles.rows, BLOCK_N=tiles.columns, BLOCK_D=padded(head_dim),
            BLOCK_T=padded(self.tail), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            enable_fp_fusion=not self.one_path,
        )  # fmt: skip

    def merge(self, batch: Batch, layout: Layout, partials: Partials, num_shared: int) -> None:
        """Launch `merge_kernel`.

        `partials` contains the rows of the sequences' partitions, then the rows of the shared
        prefix.
        """
        _, num_heads, head_dim = self.out.shape
        batch_size = len(batch.context_lens)
        launch(
            merge_kernel, (batch_size, num_heads, layout.merge_tokens),
            partials.sums, partials.weights, layout.work.merges, batch.query_starts, self.out,
            self.scores.sinks, num_shared, layout.num_partial_rows, batch_size,
            HEADS=num_heads, D=head_dim,
            BLOCK_P=1 if self.one_path else PARTITIONS_PER_MERGE, BLOCK_D=padded(head_dim),
            num_warps=1 if self.one_path else 4, num_stages=1, enable_fp_fusion=not self.one_path,
        )  # fmt: skip
