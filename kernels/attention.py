"""Paged attention over one ragged batch: chunks of prompts and single decoded tokens together.

Token t of sequence b, at position p, attends to that sequence's positions (p - window, p] (all up
to p without a window) through its block table:

    out_t = softmax(q_t K^T / sqrt(D)) V

query [T, Hq, D]; one layer's cache [2, N, H, S, D] (see `cache`), already holding this step's keys
and values. Query heads [h G, (h + 1) G) read KV head h, G = Hq / H. Slots that no token may see
can hold anything, NaN included.

What depends on the batch alone is worked out once a step by `plan_attention` and serves every
layer of the same window. Sequences with one query token are read in place where there is a kernel
for that (`in_place`); elsewhere they are gathered into padded batches (few where their lengths are
alike), with the query heads of a KV head packed as rows. A longer chunk runs by itself, gathered;
or in place too, where every token is to be computed in the same way, however its prompt is cut.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.in_place import InPlace, can_read_in_place
from penstock.kernels.scores import PLAIN, Scores, attend

Ints: TypeAlias = npt.NDArray[np.integer]

SPLIT_BYTES = 1 << 19
"""Padding worth a further padded batch; measured: what one costs in operations on a CPU core."""


@dataclass(frozen=True, slots=True)
class _Decodes:
    """Sequences with one query token each, padded to M blocks."""

    tokens: Tensor | None  # [B] their rows of the query; None: they are the whole batch, in order
    blocks: Tensor  # [2 B H M] rows of the cache seen as [2 N H, S D]
    unseen: Tensor  # rows of the gathered blocks, as [2 B H M S, D], that no token may see
    mask: Tensor  # [B, 1, 1, M S] 0 or -inf


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence with several query tokens."""

    tokens: slice  # its rows of the query
    blocks: Tensor  # [2 H M]
    context: slice  # the gathered positions that some token may see
    mask: Tensor | None  # [tokens, context] 0 or -inf; None: plainly causal, nothing before


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one step attends; for layers of one window."""

    in_place: InPlace | None
    decodes: list[_Decodes]
    chunks: list[_Chunk]
    gathered: Tensor  # [most blocks at once, S D] scratch, used by one batch after another


def plan_attention(
    query_starts: Ints,
    context_lens: Ints,
    block_tables: Ints,
    layer: Tensor,
    window: int = 0,
    one_path: bool = False,
) -> AttentionPlan:
    """Prepares a step.

    query_starts: [B + 1], context_lens: [B] (this step's tokens included), block_tables: [B, M]
    (entries past a sequence's blocks are not read); layer: any layer of the cache, for its shape,
    dtype and device; window: positions that a token sees, itself included; 0: all; one_path: a
    token of a chunk gets the same bits as a decoded one (ValueError where there is no such form).
    """
    planner = _Planner(layer, block_tables, window)
    lengths = np.diff(query_starts)
    if one_path:
        if not can_read_in_place(layer.device, layer.dtype):
            raise ValueError(f"no one path for {layer.dtype} on {layer.device}")
        every = np.arange(len(lengths))
        batch = (query_starts, context_lens, block_tables)
        return AttentionPlan(InPlace.of(every, *batch, window), [], [], layer.new_empty(0))
    single = np.flatnonzero(lengths == 1)
    in_place, gathered = None, single
    if len(single) and can_read_in_place(layer.device, layer.dtype):
        in_place = InPlace.of(single, query_starts, context_lens, block_tables, window)
        gathered = single[:0]
    decodes = [
        planner.decodes(query_starts, context_lens, group)
        for group in planner.alike(gathered, context_lens)
    ]
    chunks = [
        planner.chunk(
            b, slice(int(query_starts[b]), int(query_starts[b + 1])), int(context_lens[b])
        )
        for b in np.flatnonzero(lengths > 1).tolist()
    ]
    most = max(map(len, [p.blocks for p in decodes] + [p.blocks for p in chunks]), default=0)
    block_size, head_dim = layer.shape[3:]
    return AttentionPlan(in_place, decodes, chunks, layer.new_empty(most, block_size * head_dim))


class _Planner:
    def __init__(self, layer: Tensor, block_tables: Ints, window: int) -> None:
        _, self.num_blocks, self.num_heads, self.block_size, head_dim = layer.shape
        self.tables = block_tables
        self.window = window
        self.dtype = layer.dtype
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

    def alike(self, rows: Ints, context_lens: Ints) -> Iterator[Ints]:
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
            None if everything else self.put(query_starts[rows]),
            self.put(self.cache_rows(self.tables[rows[:, None], columns])),
            self.put(self.unseen_rows(seen)),
            self.put_mask(seen[:, None, None]),
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
            mask = self.put_mask(seen)
        return _Chunk(
            tokens,
            self.put(self.cache_rows(self.tables[row : row + 1, first : last + 1])),
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

    def put(self, array: Ints) -> Tensor:
        return torch.from_numpy(array.astype(np.int64, copy=False)).to(self.device)

    def put_mask(self, seen: npt.NDArray[np.bool_]) -> Tensor:
        mask = np.where(seen, np.float32(0), np.float32(-np.inf))
        return torch.from_numpy(mask).to(self.device, self.dtype)


def paged_attention(
    query: Tensor, layer: Tensor, plan: AttentionPlan, scores: Scores = PLAIN
) -> Tensor:
    """Attends: query [T, Hq, D], layer [2, N, H, S, D] contiguous, one dtype; [T, Hq, D]."""
    if len(plan.decodes) == 1 and plan.decodes[0].tokens is None:
        return _decode(query, layer, plan.decodes[0], plan.gathered, scores)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    if plan.in_place is not None:
        plan.in_place.attend_(out, query, layer, scores)
    for group in plan.decodes:
        picked = query[group.tokens]
        out[group.tokens] = _decode(picked, layer, group, plan.gathered, scores)
    for chunk in plan.chunks:
        out[chunk.tokens] = _prefill(query[chunk.tokens], layer, chunk, plan.gathered, scores)
    return out


def _gather(layer: Tensor, blocks: Tensor, gathered: Tensor) -> Tensor:
    num_sides, num_blocks, num_heads, block_size, head_dim = layer.shape
    rows = layer.view(num_sides * num_blocks * num_heads, block_size * head_dim)
    return torch.index_select(rows, 0, blocks, out=gathered[: len(blocks)])


def _decode(
    query: Tensor, layer: Tensor, group: _Decodes, gathered: Tensor, scores: Scores
) -> Tensor:
    batch, num_query_heads, head_dim = query.shape
    num_heads = layer.shape[2]
    kv = _gather(layer, group.blocks, gathered)
    # 0 * NaN is NaN: what is masked must still be finite.
    kv.view(-1, head_dim).index_fill_(0, group.unseen, 0.0)
    keys, values = kv.view(2, batch, num_heads, -1, head_dim)
    packed = query.view(batch, num_heads, num_query_heads // num_heads, head_dim)
    if scores.sinks is not None:
        scores = replace(scores, sinks=scores.sinks.view(num_heads, -1, 1))
    out = attend(packed, keys, values, group.mask, scores)
    return out.reshape(query.shape)


def _prefill(
    query: Tensor, layer: Tensor, chunk: _Chunk, gathered: Tensor, scores: Scores
) -> Tensor:
    length, num_query_heads, head_dim = query.shape
    num_heads = layer.shape[2]
    kv = _gather(layer, chunk.blocks, gathered).view(2, num_heads, 1, -1, head_dim)
    group = num_query_heads // num_heads
    keys, values = kv[:, :, :, chunk.context].expand(-1, -1, group, -1, -1)
    packed = query.view(length, num_heads, group, head_dim).permute(1, 2, 0, 3)
    if scores.sinks is not None:
        scores = replace(scores, sinks=scores.sinks.view(num_heads, group, 1, 1))
    out = attend(packed, keys, values, chunk.mask, scores)
    return out.permute(2, 0, 1, 3).reshape(query.shape)


def paged_attention_reference(
    query: Tensor,
    layer: Tensor,
    query_starts: Ints,
    context_lens: Ints,
    block_tables: Ints,
    window: int = 0,
    scores: Scores = PLAIN,
) -> Tensor:
    """What `plan_attention` and `paged_attention` mean, token by token and head by head."""
    _, num_query_heads, head_dim = query.shape
    _, _, num_heads, block_size, _ = layer.shape
    out = torch.empty_like(query)
    for b, context in enumerate(context_lens.tolist()):
        start, stop = int(query_starts[b]), int(query_starts[b + 1])
        for token in range(start, stop):
            position = context - stop + token
            lowest = max(position - window + 1, 0) if window else 0
            seen = np.arange(lowest, position + 1)
            blocks = torch.from_numpy(block_tables[b, seen // block_size].astype(np.int64))
            offsets = torch.from_numpy(seen % block_size)
            for head in range(num_query_heads):
                keys, values = layer[:, blocks, head * num_heads // num_query_heads, offsets]
                raw = keys @ query[token, head] * (scores.scale or head_dim**-0.5)
                out[token, head] = _shares_reference(raw, scores, head) @ values
    return out


def _shares_reference(raw: Tensor, scores: Scores, head: int) -> Tensor:
    if scores.cap:
        raw = scores.cap * (raw / scores.cap).tanh()
    if scores.sinks is None:
        return raw.softmax(0)
    return torch.cat((raw, scores.sinks[head : head + 1])).softmax(0)[:-1]
