"""Paged attention without Triton: torch computes attention over gathered blocks.

See `attention/op` for the operation and for the letters of shapes. There are three cases:

- If the numba kernel (`cpu_plan`) supports the cache, this kernel reads sequences with one query
  token and short sequences in place. With `one_path`, or if the kernel uses AMX, it reads all
  sequences in place.
- The blocks of other sequences with one query token are gathered into padded batches. The
  sequences of a batch have similar context lengths. The query heads of a KV head become the rows
  of one matrix.
- The blocks of each remaining sequence (with several query tokens) are gathered separately.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.attention.cpu_plan import CpuPagedPlan, reads_with_amx
from penstock.kernels.attention.score_mod import ScoreMod, attend
from penstock.kernels.kv_cache.format import dequantize, num_features

Ints: TypeAlias = npt.NDArray[np.integer]

SPLIT_BYTES = 1 << 19
"""A padded batch is split if the split saves more than SPLIT_BYTES bytes of padding. The time for
an additional batch equals the time for reading this number of bytes (measured)."""

MAX_PAGED_CONTEXT = 512
"""Longest context, in positions, for which a chunk is read in place without AMX. Reading in place
is a fifth faster than gathering at 128 positions, equally fast at 512, and a sixth slower at 1,024.
With AMX, it takes 0.3 to 0.8 of the time of gathering (two threads, up to 131,072 positions)."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """A batch of sequences with one query token each, padded to M blocks per sequence."""

    tokens: Tensor | None  # [B] numbers of the query rows; None means all rows, in order
    blocks: Tensor  # [2 B H M] numbers of the pages, as rows of the cache viewed as [2 N H, S W]
    unseen: Tensor  # indices of masked rows, if the gathered blocks are viewed as [2 B H M S, D]
    mask: Tensor  # [B, 1, 1, M S] 0, or -inf at masked positions
    own: Tensor  # [B] index of each token's own position among the M S gathered positions


@dataclass(frozen=True, slots=True)
class _Chunk:
    """The plan of one sequence with several query tokens."""

    tokens: slice  # rows of the query that hold the sequence's tokens
    blocks: Tensor  # [2 H M] numbers of the pages, as rows of the cache viewed as [2 N H, S W]
    context: slice  # range of the gathered positions that some token attends to
    # [tokens, context] 0, or -inf at masked positions. None means a causal mask, for a chunk that
    # is the whole context.
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class GatheredPlan:
    """Plan of one step without Triton, for all layers with the same window."""

    paged: CpuPagedPlan | None  # plan of the sequences read in place; None if there are none
    decodes: list[_Decodes]
    chunks: list[_Chunk]
    # Buffer [R, S W] for gathered pages, reused for every batch and chunk. R is the largest length
    # of a `blocks` tensor in `decodes` and `chunks`.
    gathered: Tensor

    @classmethod
    def of(
        cls,
        query_starts: Ints,
        context_lens: Ints,
        block_tables: Ints,
        layer: Tensor,
        window: int,
        reads_paged: bool,
        one_path: bool,
    ) -> "GatheredPlan":
        """Plan one step.

        `reads_paged` is True if the numba kernel supports the cache. The other arguments are those
        of `plan_attention`.
        """
        planner = _Planner(layer, block_tables, window)
        lengths = np.diff(query_starts)
        if one_path:
            if not reads_paged:
                raise ValueError(
                    "batch-invariant attention is not available for a KV cache of dtype "
                    f"{layer.dtype} with {num_features(layer)} features per head on "
                    f"{layer.device}: no kernel supports this combination (a CPU needs numba)"
                )
            every = np.arange(len(lengths))
            tiles = CpuPagedPlan.of(every, query_starts, context_lens, block_tables, window)
            return cls(tiles, [], [], layer.new_empty(0))
        single = lengths == 1
        prefers_paged = single | (context_lens <= MAX_PAGED_CONTEXT) | reads_with_amx(layer)
        is_paged = prefers_paged & (lengths > 0) & reads_paged
        paged, gathered = None, np.flatnonzero(single & ~is_paged)
        if is_paged.any():
            rows = np.flatnonzero(is_paged)
            paged = CpuPagedPlan.of(rows, query_starts, context_lens, block_tables, window)
        decodes = [
            planner.decodes(query_starts, context_lens, group)
            for group in planner.similar_lengths(gathered, context_lens)
        ]
        chunks = [
            planner.chunk(
                b, slice(int(query_starts[b]), int(query_starts[b + 1])), int(context_lens[b])
            )
            for b in np.flatnonzero((lengths > 1) & ~is_paged).tolist()
        ]
        most = max(map(len, [p.blocks for p in decodes] + [p.blocks for p in chunks]), default=0)
        return cls(paged, decodes, chunks, layer.new_empty(most, layer[0, 0, 0].numel()))

    def attend(self, query: Tensor, layer: Tensor, scores: ScoreMod) -> Tensor:
        """Return the attention output [T, Hq, D].

        `query` is [T, Hq, D], and `layer` is [2, N, H, S, W].
        """
        if len(self.decodes) == 1 and self.decodes[0].tokens is None:
            return self._decode(query, layer, self.decodes[0], scores)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if self.paged is not None:
            self.paged.attend_(out, query, layer, scores)
        for group in self.decodes:
            out[group.tokens] = self._decode(query[group.tokens], layer, group, scores)
        for chunk in self.chunks:
            out[chunk.tokens] = self._prefill(query[chunk.tokens], layer, chunk, scores)
        return out

    def _decode(self, query: Tensor, layer: Tensor, group: _Decodes, scores: ScoreMod) -> Tensor:
        batch, num_query_heads, head_dim = query.shape
        num_heads = layer.shape[2]
        kv = _gather_kv(self.gathered, layer, group.blocks, query.dtype)
        # Masked slots may hold NaN. Their content is replaced by 0, because 0 * NaN is NaN.
        kv.view(-1, head_dim).index_fill_(0, group.unseen, 0.0)
        keys, values = kv.view(2, batch, num_heads, -1, head_dim)
        packed = query.view(batch, num_heads, num_query_heads // num_heads, head_dim)
        distances = None
        if scores.slopes is not None:
            columns = torch.arange(keys.shape[2], device=query.device)
            distances = (columns - group.own[:, None])[:, None, None]
        out = attend(packed, keys, values, group.mask, _by_head(scores, num_heads, 1), distances)
        return out.reshape(query.shape)

    def _prefill(self, query: Tensor, layer: Tensor, chunk: _Chunk, scores: ScoreMod) -> Tensor:
        length, num_query_heads, head_dim = query.shape
        num_heads = layer.shape[2]
        kv = _gather_kv(self.gathered, layer, chunk.blocks, query.dtype)
        kv = kv.view(2, 1, num_heads, -1, head_dim)[:, :, :, chunk.context]
        group = num_query_heads // num_heads
        keys, values = kv.transpose(1, 2).expand(-1, -1, group, -1, -1)
        packed = query.view(length, num_heads, group, head_dim).permute(1, 2, 0, 3)
        distances = None
        if scores.slopes is not None:
            columns = torch.arange(keys.shape[2], device=query.device)
            distances = columns - columns[-length:, None]
        out = attend(packed, keys, values, chunk.mask, _by_head(scores, num_heads, 2), distances)
        return out.permute(2, 0, 1, 3).reshape(query.shape)


def _gather_kv(gathered: Tensor, layer: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the pages with the numbers `blocks`, converted to `dtype`.

    A page is the keys or the values of one block and KV head. The result is contiguous and has
    len(blocks) S D elements. `gathered` is a scratch buffer; the result may be a view of it.
    """
    rows, found = layer.view(-1, gathered.shape[1]), gathered[: len(blocks)]
    if layer.dtype == dtype:
        return torch.index_select(rows, 0, blocks, out=found)
    # index_select does not support float8 on every device, but it does support uint8.
    torch.index_select(rows.view(torch.uint8), 0, blocks, out=found.view(torch.uint8))
    return dequantize(found.view(-1, *layer.shape[3:]), dtype)


def _by_head(scores: ScoreMod, num_heads: int, trailing: int) -> ScoreMod:
    """Return a copy of `scores` in which sinks and slopes [Hq] are viewed as [H, G, 1, ...].

    `trailing` is the number of dimensions of size 1.
    """
    if scores.sinks is None and scores.slopes is None:
        return scores
    shape = (num_heads, -1, *(1,) * trailing)
    sinks = None if scores.sinks is None else scores.sinks.view(shape)
    slopes = None if scores.slopes is None else scores.slopes.view(shape)
    return replace(scores, sinks=sinks, slopes=slopes)


class _Planner:
    """Builds the parts of a `GatheredPlan`."""

    def __init__(self, layer: Tensor, block_tables: Ints, window: int) -> None:
        _, self.num_blocks, self.num_heads, self.block_size, slot = layer.shape
        self.tables = block_tables
        self.window = window
        # dtype of the masks. On a CPU it is float32, because float32 queries may read a bfloat16
        # cache.
        plain = layer.itemsize > 1 and layer.device.type != "cpu"
        self.dtype = layer.dtype if plain else torch.float32
        self.device = layer.device
        self.block_bytes = 2 * self.num_heads * self.block_size * slot * layer.itemsize

    def seen_blocks(self, query_len: int, contexts: Ints) -> tuple[Ints, Ints]:
        """Return, for each sequence, the first block and the number of blocks that it attends to.

        Each sequence has `query_len` query tokens. `contexts` are the context lengths of the
        sequences. Blocks are counted from the start of their sequence.
        """
        last = (contexts - 1) // self.block_size
        if not self.window:
            return np.zeros_like(last), last + 1
        lowest = np.maximum(contexts - query_len - self.window + 1, 0)
        first = lowest // self.block_size
        return first, last + 1 - first

    def similar_lengths(self, rows: Ints, context_lens: Ints) -> Iterator[Ints]:
        """Yield the sequences with the numbers `rows` in groups of similar context length.

        The sequences are split into more groups as long as a split saves more than SPLIT_BYTES of
        padding.
        """
        if not len(rows):
            return
        _, num_blocks = self.seen_blocks(1, context_lens[rows])
        order = np.argsort(num_blocks, kind="stable")
        ascending = num_blocks[order]
        stop = len(rows)
        while stop > 1:
            cuts = np.arange(1, stop)
            saved = cuts * (ascending[stop - 1] - ascending[: stop - 1])
            best = int(saved.argmax())
            if saved[best] * self.block_bytes <= SPLIT_BYTES:
                break
            yield rows[np.sort(order[best + 1 : stop])]
            stop = best + 1
        yield rows[np.sort(order[:stop])]

    def decodes(self, query_starts: Ints, context_lens: Ints, rows: Ints) -> _Decodes:
        contexts = context_lens[rows]
        first, num_blocks = self.seen_blocks(1, contexts)
        columns = first[:, None] + np.arange(num_blocks.max())
        # Padding columns are masked. They repeat the sequence's last block, so that every column
        # has a valid block number.
        columns = np.minimum(columns, (first + num_blocks - 1)[:, None])
        positions = first[:, None] * self.block_size + np.arange(columns.shape[1] * self.block_size)
        seen = positions < contexts[:, None]
        if self.window:
            seen &= positions >= contexts[:, None] - self.window
        everything = len(rows) == len(context_lens) == query_starts[-1]
        return _Decodes(
            None if everything else self.to_device(query_starts[rows]),
            self.to_device(self.cache_rows(self.tables[rows[:, None], columns])),
            self.to_device(self.unseen_rows(seen)),
            self.mask_to_device(seen[:, None, None]),
            self.to_device(contexts - 1 - first * self.block_size),
        )

    def chunk(self, row: int, tokens: slice, context: int) -> _Chunk:
        query_len = tokens.stop - tokens.start
        lowest = max(context - query_len - self.window + 1, 0) if self.window else 0
        first, last = lowest // self.block_size, (context - 1) // self.block_size
        begin = first * self.block_size
        positions = np.arange(lowest, context)
        queries = np.arange(context - query_len, context)[:, None]
        mask = None
        if query_len != context or 0 < self.window < context:
            seen = positions <= queries
            if self.window:
                seen &= positions > queries - self.window
            mask = self.mask_to_device(seen)
        return _Chunk(
            tokens,
            self.to_device(self.cache_rows(self.tables[row : row + 1, first : last + 1])),
            slice(lowest - begin, context - begin),
            mask,
        )

    def cache_rows(self, table: Ints) -> Ints:
        """Convert block numbers [B, M] to page numbers [2 B H M].

        Pages are numbered as the rows of the cache viewed as [2 N H, S W].
        """
        sides = np.arange(2)[:, None, None, None] * self.num_blocks
        blocks = table.astype(np.int64)[None, :, None] + sides
        heads = np.arange(self.num_heads)[:, None]
        return (blocks * self.num_heads + heads).ravel()

    def unseen_rows(self, seen: npt.NDArray[np.bool_]) -> Ints:
        """Return the numbers of the masked rows of the gathered blocks.

        The gathered blocks are viewed as [2 B H M S, D]. `seen` [B, M S] is False at masked
        positions.
        """
        batch, num_slots = seen.shape
        row, slot = np.nonzero(~seen)
        sides = np.arange(2)[:, None, None] * batch
        heads = np.arange(self.num_heads)[:, None]
        rows: Ints = ((sides + row) * self.num_heads + heads) * num_slots + slot
        return rows.ravel()

    def to_device(self, array: Ints) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self.device)

    def mask_to_device(self, seen: npt.NDArray[np.bool_]) -> Tensor:
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))
        return torch.from_numpy(mask).to(self.device, self.dtype)
