"""Paged attention in plain torch: blocks are gathered, then multiplied.

Sequences with one query token, and short ones, are read in place where there is a kernel for that
(`in_place`); elsewhere single tokens are gathered into padded batches (few where their lengths are
alike), with the query heads of a KV head packed as rows. A longer chunk runs by itself, gathered;
or in place too, where every token is to be computed in the same way, however its prompt is cut.
See `attention` for what is computed.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.attention.cpu_plan import CpuPagedPlan
from penstock.kernels.attention.score_mod import ScoreMod, attend

Ints: TypeAlias = npt.NDArray[np.integer]

SPLIT_BYTES = 1 << 19
"""Padding worth a further padded batch; measured: what one costs in operations on a CPU core."""

MAX_PADDING = 512
"""Positions of a sequence up to which its chunk, too, is read in place; measured: of 512 as fast as
gathered for torch, of 128 a fifth faster, of 1,024 a sixth slower."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one query token each, padded to M blocks."""

    tokens: Tensor | None  # [B] their rows of the query; None: they are the whole batch, in order
    blocks: Tensor  # [2 B H M] rows of the cache seen as [2 N H, S D]
    unseen: Tensor  # rows of the gathered blocks, as [2 B H M S, D], that no token may see
    mask: Tensor  # [B, 1, 1, M S] 0 or -inf
    own: Tensor  # [B] columns of the tokens themselves


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence with several query tokens."""

    tokens: slice  # its rows of the query
    blocks: Tensor  # [2 H M]
    context: slice  # the gathered positions that some token may see
    mask: Tensor | None  # [tokens, context] 0 or -inf; None: plainly causal, nothing before


@dataclass(frozen=True, slots=True)
class GatheredPlan:
    """How one step attends; for layers of one window."""

    paged: CpuPagedPlan | None
    decodes: list[_Decodes]
    chunks: list[_Chunk]
    gathered: Tensor  # [most blocks at once, S D] scratch, used by one batch after another

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
        """Arguments as of `plan_attention`."""
        planner = _Planner(layer, block_tables, window)
        lengths = np.diff(query_starts)
        if one_path:
            if not reads_paged:
                raise ValueError(f"no one path for {layer.dtype} on {layer.device}")
            every = np.arange(len(lengths))
            tiles = CpuPagedPlan.of(every, query_starts, context_lens, block_tables, window)
            return cls(tiles, [], [], layer.new_empty(0))
        single = lengths == 1
        near = (single | (context_lens <= MAX_PADDING)) & (lengths > 0) & reads_paged
        paged, gathered = None, np.flatnonzero(single & ~near)
        if near.any():
            rows = np.flatnonzero(near)
            paged = CpuPagedPlan.of(rows, query_starts, context_lens, block_tables, window)
        decodes = [
            planner.decodes(query_starts, context_lens, group)
            for group in planner.similar_lengths(gathered, context_lens)
        ]
        chunks = [
            planner.chunk(
                b, slice(int(query_starts[b]), int(query_starts[b + 1])), int(context_lens[b])
            )
            for b in np.flatnonzero((lengths > 1) & ~near).tolist()
        ]
        most = max(map(len, [p.blocks for p in decodes] + [p.blocks for p in chunks]), default=0)
        block_size, head_dim = layer.shape[3:]
        return cls(paged, decodes, chunks, layer.new_empty(most, block_size * head_dim))

    def attend(
        self, query: Tensor, layer: Tensor, scores: ScoreMod, scales: Tensor | None = None
    ) -> Tensor:
        """query [T, Hq, D], layer [2, N, H, S, D], scales [2, H] or None; [T, Hq, D]."""
        if len(self.decodes) == 1 and self.decodes[0].tokens is None:
            return self._decode(query, layer, self.decodes[0], scores, scales)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        if self.paged is not None:
            self.paged.attend_(out, query, layer, scores)
        for group in self.decodes:
            picked = query[group.tokens]
            out[group.tokens] = self._decode(picked, layer, group, scores, scales)
        for chunk in self.chunks:
            out[chunk.tokens] = self._prefill(query[chunk.tokens], layer, chunk, scores, scales)
        return out

    def _decode(
        self,
        query: Tensor,
        layer: Tensor,
        group: _Decodes,
        scores: ScoreMod,
        scales: Tensor | None,
    ) -> Tensor:
        batch, num_query_heads, head_dim = query.shape
        num_heads = layer.shape[2]
        kv = _gather_kv(self.gathered, layer, group.blocks, query.dtype)
        # 0 * NaN is NaN: what is masked must still be finite.
        kv.view(-1, head_dim).index_fill_(0, group.unseen, 0.0)
        keys, values = _scaled(kv.view(2, batch, num_heads, -1, head_dim), scales)
        packed = query.view(batch, num_heads, num_query_heads // num_heads, head_dim)
        distances = None
        if scores.slopes is not None:
            columns = torch.arange(keys.shape[2], device=query.device)
            distances = (columns - group.own[:, None])[:, None, None]
        out = attend(packed, keys, values, group.mask, _by_head(scores, num_heads, 1), distances)
        return out.reshape(query.shape)

    def _prefill(
        self,
        query: Tensor,
        layer: Tensor,
        chunk: _Chunk,
        scores: ScoreMod,
        scales: Tensor | None,
    ) -> Tensor:
        length, num_query_heads, head_dim = query.shape
        num_heads = layer.shape[2]
        kv = _gather_kv(self.gathered, layer, chunk.blocks, query.dtype)
        kv = kv.view(2, 1, num_heads, -1, head_dim)[:, :, :, chunk.context]
        group = num_query_heads // num_heads
        kv = _scaled(kv, scales).transpose(1, 2)
        keys, values = kv.expand(-1, -1, group, -1, -1)
        packed = query.view(length, num_heads, group, head_dim).permute(1, 2, 0, 3)
        distances = None
        if scores.slopes is not None:
            columns = torch.arange(keys.shape[2], device=query.device)
            distances = columns - columns[-length:, None]
        out = attend(packed, keys, values, chunk.mask, _by_head(scores, num_heads, 2), distances)
        return out.permute(2, 0, 1, 3).reshape(query.shape)


def _gather_kv(gathered: Tensor, layer: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The blocks' rows [2 B H M, S D], of this dtype."""
    rows, found = layer.view(-1, gathered.shape[1]), gathered[: len(blocks)]
    if layer.dtype == dtype:
        return torch.index_select(rows, 0, blocks, out=found)
    # Numbers of eight bits are not selected everywhere; bytes are.
    torch.index_select(rows.view(torch.uint8), 0, blocks, out=found.view(torch.uint8))
    return found.to(dtype)


def _scaled(kv: Tensor, scales: Tensor | None) -> Tensor:
    """kv [2, B, H, C, D], scales [2, H]."""
    return kv if scales is None else kv * scales.to(kv.dtype)[:, None, :, None, None]


def _by_head(scores: ScoreMod, num_heads: int, trailing: int) -> ScoreMod:
    """What is a head's own, shaped [H, G] and then ones."""
    if scores.sinks is None and scores.slopes is None:
        return scores
    shape = (num_heads, -1, *(1,) * trailing)
    sinks = None if scores.sinks is None else scores.sinks.view(shape)
    slopes = None if scores.slopes is None else scores.slopes.view(shape)
    return replace(scores, sinks=sinks, slopes=slopes)


class _Planner:
    def __init__(self, layer: Tensor, block_tables: Ints, window: int) -> None:
        _, self.num_blocks, self.num_heads, self.block_size, head_dim = layer.shape
        self.tables = block_tables
        self.window = window
        # Of masks. On a CPU a narrow cache may be a float32 query's.
        plain = layer.itemsize > 1 and layer.device.type != "cpu"
        self.dtype = layer.dtype if plain else torch.float32
        self.device = layer.device
        self.block_bytes = 2 * self.num_heads * self.block_size * head_dim * layer.itemsize

    def seen_blocks(self, query_len: int, contexts: Ints) -> tuple[Ints, Ints]:
        """The first block that some token sees, and the number of blocks from there."""
        last = (contexts - 1) // self.block_size
        if not self.window:
            return np.zeros_like(last), last + 1
        lowest = np.maximum(contexts - query_len - self.window + 1, 0)
        first = lowest // self.block_size
        return first, last + 1 - first

    def similar_lengths(self, rows: Ints, context_lens: Ints) -> Iterator[Ints]:
        """Splits the rows into groups of like length where padding would cost more."""
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
        # A padded column repeats the sequence's own last block: it is there, and wholly unseen.
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
        """[B, M] blocks to [2 B H M] rows of the cache seen as [2 N H, S D]."""
        sides = np.arange(2)[:, None, None, None] * self.num_blocks
        blocks = table.astype(np.int64)[None, :, None] + sides
        heads = np.arange(self.num_heads)[:, None]
        return (blocks * self.num_heads + heads).ravel()

    def unseen_rows(self, seen: npt.NDArray[np.bool_]) -> Ints:
        """[B, M S] to the rows of the gathered [2 B H M S, D] that are not seen."""
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
