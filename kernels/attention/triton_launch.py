"""Launches the Triton kernels of paged attention, with work items and tiles chosen for the batch.

If the query rows of a sequence fit into one tile, the positions of the sequence are split into
partitions of SPLIT positions. A longer chunk gets one program per row tile. A list of work items
assigns work to programs. Tensor operations build the list on the device that holds the lengths. On
the host, the list has the exact size. On a GPU, the list has the largest possible size and is
padded with -1, so that no value is copied to the host. A captured CUDA graph is therefore valid for
all lengths up to the bound with which it was planned.

With `one_path`, results are batch-invariant: all tiles have one size, chunks are also computed in
partitions that are merged in order, and multiply-adds are not fused.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.attention.triton import attend_kernel, merge_kernel
from penstock.kernels.attention.triton_configs import (
    Tiles,
    batch_invariant_tiles,
    chunk_tiles,
    split_kv_tiles,
)
from penstock.kernels.checks import E4M3
from penstock.kernels.kv_cache.format import format_of
from penstock.kernels.triton_common.launch import device_info, launch, power_of_2

Ints: TypeAlias = npt.NDArray[np.integer]

SPLIT = 512
"""Positions per partition. Constant, so that a sequence's partitions do not depend on the batch."""

PARTITIONS_PER_MERGE = 32
"""Number of partitions that `merge_kernel` merges per iteration."""


class Batch(NamedTuple):
    """Offsets, lengths and block tables of a batch: int32 tensors on the device."""

    query_starts: Tensor  # [B + 1] first query row of each sequence, and the number of rows
    context_lens: Tensor  # [B] context length of each sequence
    tables: Tensor  # [B, M] block tables


class WorkItems(NamedTuple):
    """A list of work items, each a partition or a row tile of one sequence."""

    items: Tensor  # [I, 2] int32 sequence (-1: no work) and index of its partition or row tile
    starts: Tensor  # [B + 1] int32 first item of each sequence, and the number of items

    def to(self, device: torch.device) -> "WorkItems":
        return WorkItems(self.items.to(device), self.starts.to(device))


def make_work_items(counts: Tensor, firsts: Tensor, bound: int) -> WorkItems:
    """Return the work items of all sequences, in order of sequence.

    Args:
        counts: [B] int32 number of items of each sequence.
        firsts: [B] int32 index of each sequence's first partition or row tile.
        bound: size of the padded list if `counts` is on a GPU; otherwise not used.
    """
    size = int(counts.sum()) if is_known(counts) else bound
    starts = torch.zeros(len(counts) + 1, dtype=torch.int32, device=counts.device)
    torch.cumsum(counts, 0, dtype=torch.int32, out=starts[1:])
    index = torch.arange(size, dtype=torch.int32, device=counts.device)
    sequence = torch.searchsorted(starts[1:], index, right=True, out_int32=True)
    safe = sequence.clamp(max=len(counts) - 1)
    which = firsts[safe] + index - starts[safe]
    sequence = torch.where(sequence < len(counts), sequence, -1)
    return WorkItems(torch.stack((sequence, which), 1).to(torch.int32), starts)


def is_known(lengths: Tensor) -> bool:
    """Return whether the values of `lengths` are on the host and may be read."""
    return lengths.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class _Prefix:
    """Launch for a shared prefix, which is read once for the whole batch.

    All tokens of the batch are treated as one sequence that follows the prefix.
    """

    batch: Batch
    items: WorkItems
    tiles: Tiles


@dataclass(frozen=True, slots=True)
class _Layout:
    """Work items and tiles of one step, for one shape of the query."""

    chunks: WorkItems | None
    chunk_tiles: Tiles
    partitions: WorkItems | None
    partition_tiles: Tiles
    partition_tokens: int  # maximum number of query tokens of a sequence that is split
    merges: bool  # True if some sequence may have several partitions
    prefix: _Prefix | None


@dataclass(frozen=True, slots=True)
class TiledPlan:
    """Plan of one step for the Triton kernels, for all layers with the same window."""

    batch: Batch
    lengths: tuple[Tensor, Tensor]  # query_starts and context_lens; on the host if known there
    max_query: int  # maximum number of query tokens of a sequence
    max_context: int  # maximum context length of a sequence
    window: int = 0
    # Length of the shared prefix, a multiple of SPLIT; 0 unless every sequence has one query token.
    prefix: int = 0
    one_path: bool = False  # batch-invariant results; requires `prefix` = 0
    layouts: dict[tuple[int, int, int], _Layout] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        query_starts: Ints,
        context_lens: Ints,
        tables: Ints,
        device: torch.device,
        window: int = 0,
        prefix: int = 0,
        one_path: bool = False,
    ) -> "TiledPlan":
        """Plan one step from arrays on the host.

        `prefix` is the number of positions that all sequences share, from position 0. It is rounded
        down to a multiple of SPLIT.
        """
        arrays = (query_starts, context_lens, tables)
        here = Batch(*(torch.from_numpy(np.ascontiguousarray(each, np.int32)) for each in arrays))
        return cls(
            Batch(*(each.to(device) for each in here)),
            (here.query_starts, here.context_lens),
            int(np.diff(query_starts).max(initial=0)),
            int(context_lens.max(initial=0)),
            window,
            prefix // SPLIT * SPLIT,
            one_path,
        )

    def attend(
        self,
        query: Tensor,
        layer: Tensor,
        scores: ScoreMod,
        tail: int = 0,
    ) -> Tensor:
        """Return the attention output [T, Hq, D].

        Args:
            query: [T, Hq, D].
            layer: [2, N, H, S, W].
            scores: changes to the scores before the softmax.
            tail: for MLA, number of features after the first D; they only contribute to the score.
                `query` is then [T, Hq, D + tail], and `layer` is [1, N, 1, S, D + tail].
        """
        shape = (*query.shape[:2], query.shape[2] - tail)
        out = torch.empty(shape, dtype=query.dtype, device=query.device)
        if not out.numel():
            return out
        key = (len(query), query.shape[1] // layer.shape[2], query.shape[2])
        layout = self.layouts.get(key)
        if layout is None:
            layout = self.layouts[key] = self._layout(query, layer)
        call = _Call(query, layer, scores, out, self.window, tail, self.one_path)
        if layout.chunks is not None:
            call.tiles(self.batch, layout.chunks, layout.chunk_tiles)
        if layout.partitions is not None:
            _attend_split_kv(call, self.batch, layout.partitions, layout)
        return out

    def _layout(self, query: Tensor, layer: Tensor) -> _Layout:
        starts, contexts = self.lengths
        device, group = query.device, query.shape[1] // layer.shape[2]
        of_partitions, of_chunks = self._tiles(query, layer)
        lengths = starts[1:] - starts[:-1]
        few = max(1, of_partitions.rows // group)
        is_few = (lengths > 0) & (lengths <= few)
        low = (contexts - lengths - self.window + 1).clamp(min=0) if self.window else contexts * 0
        firsts = (low // SPLIT).clamp(min=self.prefix // SPLIT)
        counts = ((contexts + SPLIT - 1) // SPLIT - firsts) * is_few
        partitions = make_work_items(counts, firsts, len(counts) * -(-self.max_context // SPLIT))
        counts = (lengths * group + of_chunks.rows - 1) // of_chunks.rows * (lengths > few)
        bound = 0 if self.max_query <= few else len(query) * group // of_chunks.rows + len(counts)
        chunks = make_work_items(counts, torch.zeros_like(counts), bound)
        known = is_known(starts)
        return _Layout(
            # Reversed: the last tiles of a chunk take longest and should therefore start first.
            WorkItems(chunks.items.flip(0), chunks.starts).to(device)
            if len(chunks.items)
            else None,
            of_chunks,
            partitions.to(device) if len(partitions.items) else None,
            of_partitions,
            1 if self.max_query == 1 else few,
            not known or bool(self.prefix) or len(partitions.items) > int(is_few.sum()),
            self._prefix(len(query), of_chunks) if self.prefix else None,
        )

    def _tiles(self, query: Tensor, layer: Tensor) -> tuple[Tiles, Tiles]:
        """Return (tile sizes for partitions, tile sizes for chunks)."""
        chip, width = device_info(query), power_of_2(query.shape[2])
        if self.one_path:
            fixed = batch_invariant_tiles(chip, width, query.itemsize, layer.itemsize)
            return fixed, fixed
        group = query.shape[1] // layer.shape[2]
        of_partitions = split_kv_tiles(chip, width, query.itemsize, group, layer.itemsize)
        return of_partitions, chunk_tiles(chip, width, query.itemsize, layer.itemsize)

    def _prefix(self, num_tokens: int, tiles: Tiles) -> _Prefix:
        device = self.batch.tables.device
        # Create on the host, not on the default device: the number of items is read on the host.
        starts = torch.tensor([0, num_tokens], dtype=torch.int32, device="cpu")
        number = torch.tensor([self.prefix // SPLIT], dtype=torch.int32, device="cpu")
        batch = Batch(starts.to(device), (starts[1:] + self.prefix).to(device), self.batch.tables)
        return _Prefix(
            batch, make_work_items(number, torch.zeros_like(number), 0).to(device), tiles
        )


def padded(head_dim: int) -> int:
    """Return the padded head size: a power of two, and at least 16, as `tl.dot` requires."""
    return max(16, power_of_2(head_dim))


@dataclass(frozen=True, slots=True)
class _Partitions:
    """Partial results of partitions, which `merge_kernel` merges."""

    sums: Tensor  # [P, Hq, D] float32 unnormalized sums of values
    weights: Tensor  # [P, Hq, 2] float32 maximum score and sum of exponentials
    tokens: int  # rows of `sums` and `weights` per work item
    all_merged: bool  # True if sequences with one partition are merged too


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of one layer's kernel launches."""

    query: Tensor
    layer: Tensor
    scores: ScoreMod
    out: Tensor
    window: int
    tail: int
    one_path: bool

    def tiles(
        self, batch: Batch, items: WorkItems, tiles: Tiles, partitions: _Partitions | None = None
    ) -> None:
        """Launch `attend_kernel`. Items are partitions if `partitions` is given, else row tiles."""
        _, num_heads, head_dim = self.out.shape
        _, _, num_kv_heads, block_size, slot = self.layer.shape
        form, layer = format_of(self.layer.dtype), self.layer
        # Chips without this dtype get its bits.
        soft = layer.dtype == E4M3 and not device_info(layer).converts_e4m3
        group = num_heads // num_kv_heads
        row_tiles = -(-partitions.tokens * group // tiles.rows) if partitions else 1
        scores = self.scores
        launch(
            attend_kernel, (len(items.items), num_kv_heads, row_tiles),
            self.query, layer.view(torch.uint8) if soft else layer,
            batch.tables, batch.query_starts, batch.context_lens,
            items.items, items.starts, self.out,
            partitions.sums if partitions else None, partitions.weights if partitions else None,
            scores.sinks, scores.slopes,
            layer.view(-1).view(torch.float16) if form.has_scales else None,
            self.query.stride(0), batch.tables.stride(0), layer.stride(0),
            head_dim**-0.5 if scores.scale is None else scores.scale, scores.cap or None,
            partitions.tokens if partitions else 1,
            H=num_kv_heads, G=group, S=block_size, D=head_dim, TAIL=self.tail,
            PAGE=block_size * slot, UNIT=256.0 if soft else 1.0, GAIN=form.value_gain,
            WINDOW=self.window,
            SPLIT=SPLIT if partitions or self.one_path else 0,
            SEQUENTIAL=self.one_path and partitions is None,
            ALL_MERGED=partitions is not None and partitions.all_merged,
            BLOCK_M=tiles.rows, BLOCK_N=tiles.columns, BLOCK_D=padded(head_dim),
            BLOCK_T=padded(self.tail), num_warps=tiles.num_warps, num_stages=tiles.num_stages,
            enable_fp_fusion=not self.one_path,
        )  # fmt: skip

    def merge(
        self, batch: Batch, items: WorkItems, partitions: _Partitions, num_shared: int
    ) -> None:
        """Launch `merge_kernel`.

        `partitions` holds the rows of `items`, then the rows of the shared prefix.
        """
        _, num_heads, head_dim = self.out.shape
        batch_size = len(batch.context_lens)
        launch(
            merge_kernel, (batch_size, num_heads),
            partitions.sums, partitions.weights, items.starts, batch.query_starts, self.out,
            self.scores.sinks, partitions.tokens, num_shared, len(items.items) * partitions.tokens,
            batch_size, HEADS=num_heads, D=head_dim,
            BLOCK_P=1 if self.one_path else PARTITIONS_PER_MERGE, BLOCK_D=padded(head_dim),
            num_warps=1 if self.one_path else 4, num_stages=1, enable_fp_fusion=not self.one_path,
        )  # fmt: skip


def _attend_split_kv(call: _Call, batch: Batch, items: WorkItems, layout: _Layout) -> None:
    num_tokens, num_heads, head_dim = call.out.shape
    prefix = layout.prefix
    own = len(items.items) * layout.partition_tokens
    num_shared = len(prefix.items.items) if prefix else 0
    size, device = own + num_shared * num_tokens, call.query.device
    sums = torch.empty(size, num_heads, head_dim, dtype=torch.float32, device=device)
    weights = torch.empty(size, num_heads, 2, dtype=torch.float32, device=device)
    partitions = _Partitions(sums, weights, layout.partition_tokens, prefix is not None)
    if prefix is not None:
        shared = _Partitions(sums[own:], weights[own:], num_tokens, True)
        call.tiles(prefix.batch, prefix.items, prefix.tiles, shared)
    call.tiles(batch, items, layout.partition_tiles, partitions)
    if layout.merges:
        call.merge(batch, items, partitions, num_shared)
