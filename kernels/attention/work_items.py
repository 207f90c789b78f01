"""Work items of the attention kernels, made on the host from the lengths of a step (pure numpy).

An item is a row tile of one sequence and a range of the sequence's positions; a program of
`attend_kernel` computes an item for one KV head. A row is one query token and one query head of the
KV head. If the positions of a sequence are cut into several ranges (partitions), the items write
partial results, which `merge_kernel` merges in the order of positions. Items are of two kinds:

- Few rows: the query rows of the sequence fit into one tile, as in decode. A fixed number of
  workers computes the list of these items, and each worker computes a contiguous range of the list
  (a persistent grid). Contexts are cut only where the range of a worker ends. The work of all
  workers is therefore equal, and the number of partial results is small for any context lengths.
- Chunks: normally, each item is one row tile with all its positions. A short chunk after a long
  cached prefix has too few tiles to fill the device. Contexts are then cut into partitions of one
  length, so that the programs fill the device.

With `one_path`, the partitions of a sequence must not depend on the batch or the device. Contexts
are therefore cut only at the multiples of SPLIT. A row tile of a chunk has either one item per
partition, or one item that computes all partitions in order. The results are bitwise identical.

Shapes: B sequences, I and J work items.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.integer]
Ints32: TypeAlias = npt.NDArray[np.int32]

SPLIT = 512
"""Positions per partition, with `one_path` and in a shared prefix."""

QUANTUM = 128
"""Without `one_path`, contexts of sequences with few rows are cut at multiples of QUANTUM, which
divides SPLIT."""

CHUNK_SPLIT = 1024
"""Without `one_path`, the length of a chunk's partitions is a multiple of CHUNK_SPLIT, which is a
multiple of SPLIT."""

MAX_PARTIAL_BYTES = 64 << 20
"""Maximum bytes of the partial sums of chunks. The memory profile does not measure a step with
split chunks. It measures a step with the largest number of tokens. The other tensors of that step
need more memory than the partial sums."""

ALL = np.iinfo(np.int32).max
"""End of positions of an item that covers all positions of its rows."""


class WorkShape(NamedTuple):
    """Sizes that determine the work items of a step, together with the lengths of the step."""

    num_kv_heads: int
    group: int  # query heads per KV head
    few_rows: int  # rows of a tile for sequences with few query rows
    chunk_rows: int  # rows of a tile for chunks; equal to `few_rows` with `one_path`
    few_programs: int  # number of programs of the persistent grid
    chunk_programs: int  # number of programs over which split chunks are distributed
    row_bytes: int  # bytes of a token's partial sums

    @property
    def num_workers(self) -> int:
        """Number of workers (programs of the persistent grid) per KV head."""
        return max(1, self.few_programs // self.num_kv_heads)


class StepWork(NamedTuple):
    """The work items of a step.

    An item has five columns: sequence, row tile, first position, end of positions, and first row in
    the partial results. A first row of -1 means that the item's result is final. The row of a token
    is the first row plus the token's index in its sequence.
    """

    few: Ints32  # [I, 5] items of sequences with few query rows
    worker_starts: Ints32  # [num_workers + 1] index in `few` of each worker's first item; then I
    chunks: Ints32  # [J, 5] items of prefill chunks
    in_order: bool  # True if an item of `chunks` computes all its partitions (only with `one_path`)
    # [B, 2] first row in the partial results and number of partitions of each sequence.
    # If the number of partitions is 0, there is nothing to merge for the sequence.
    merges: Ints32
    merge_tokens: int  # largest number of tokens of a sequence to merge; 0 if there is none
    num_partial_rows: int


def make_step_work(
    query_starts: Ints,
    context_lens: Ints,
    window: int,
    prefix: int,
    one_path: bool,
    shape: WorkShape,
) -> StepWork:
    """Return the work items of a step.

    Args:
        query_starts: [B + 1] index of each sequence's first query row, then the number of rows.
        context_lens: [B] length of each sequence, including this step's tokens.
        window: number of positions that a token attends to; 0 means all.
        prefix: number of positions at the start of all sequences to leave out, because another
            launch computes them for all sequences. If it is not 0, all sequences have a merge.
        one_path: cut contexts only at multiples of SPLIT.
        shape: sizes of heads, tiles and grids.
    """
    lengths, contexts = np.diff(query_starts).astype(np.int64), context_lens.astype(np.int64)
    low = np.maximum(contexts - lengths - window + 1, 0) if window else np.zeros_like(contexts)
    low = np.maximum(low, prefix)
    is_few = (lengths > 0) & (lengths <= max(1, shape.few_rows // shape.group))
    is_chunk = (lengths > 0) & ~is_few
    few_tiles = -(-lengths * shape.group // shape.few_rows)
    chunk_tiles = -(-lengths * shape.group // shape.chunk_rows)
    in_order = one_path and not _splits_in_order(lengths, low, contexts, is_chunk, shape)
    if one_path:
        few = _cut(low, contexts, is_few if in_order else lengths > 0, SPLIT)
    else:
        few = _cut_evenly(low, contexts, few_tiles * is_few, shape.num_workers)
    if in_order:
        chunks = _uncut(is_chunk)
    elif one_path:
        chunks = _uncut(np.zeros_like(is_chunk))
    else:
        extents = contexts - low // SPLIT * SPLIT
        size = chunk_partition(lengths, extents, chunk_tiles * is_chunk, shape)
        chunks = _cut(low, contexts, is_chunk, size)
    few_rows, few_merges, num_rows = _partial_rows(few, lengths, 0, bool(prefix))
    chunk_rows, chunk_merges, num_rows = _partial_rows(chunks, lengths, num_rows, False)
    merges = few_merges + chunk_merges
    few_items = _items(few, few_rows, few_tiles)
    cost = np.ones(len(few_items), np.int64)
    if not one_path:
        cost = (few_items[:, 3] - few_items[:, 2]) // QUANTUM
    return StepWork(
        few_items,
        _worker_starts(cost, shape.num_workers),
        # The order is reversed, because the last tiles of a chunk take longest and should therefore
        # start first.
        _items(chunks, chunk_rows, chunk_tiles)[::-1].copy(),
        in_order,
        merges.astype(np.int32),
        int(lengths[merges[:, 1] > 0].max(initial=0)),
        num_rows,
    )


def shared_prefix_items(num_tokens: int, prefix: int, first_row: int, shape: WorkShape) -> Ints32:
    """Return the items [I, 5] of a shared prefix. They treat all tokens of a step as one sequence.

    `first_row` is the first row of the prefix in the partial results. Partition p of token t has
    the row `first_row + p * num_tokens + t`.
    """
    one = np.ones(1, np.int64)
    pieces = _cut(0 * one, prefix * one, one > 0, SPLIT)
    rows = first_row + np.arange(len(pieces.sequence)) * num_tokens
    return _items(pieces, rows, -(-num_tokens * shape.group // shape.chunk_rows) * one)


def decode_capacity(
    num_rows: int, max_context: int, window: int, one_path: bool, shape: WorkShape
) -> tuple[int, int]:
    """Return two upper bounds for a decode step: number of items, and rows of partial results.

    `num_rows` is the number of sequences. Without `one_path`, the bounds do not depend on
    `max_context` and `window`.
    """
    if one_path:
        most = -(-max_context // SPLIT)
        pieces = num_rows * (min(most, -(-window // SPLIT) + 1) if window else most)
    else:
        pieces = num_rows + 2 * shape.num_workers + 1
    return pieces * -(-shape.group // shape.few_rows), pieces


def chunk_partition(lengths: Ints, extents: Ints, tiles: Ints, shape: WorkShape) -> int:
    """Return the number of positions per partition of chunks, a multiple of CHUNK_SPLIT.

    The number is chosen so that about `shape.chunk_programs` programs compute the chunks, each with
    the same number of positions. It is then doubled until the partial sums have at most
    MAX_PARTIAL_BYTES.

    Args:
        lengths: [B] number of query tokens of each sequence.
        extents: [B] number of positions of each sequence to cut into partitions.
        tiles: [B] number of row tiles of each sequence; 0 if the sequence is not a chunk.
        shape: sizes of heads, tiles and grids.
    """
    positions = int((tiles * extents).sum()) * shape.num_kv_heads
    size = max(1, -(-positions // (shape.chunk_programs * CHUNK_SPLIT))) * CHUNK_SPLIT
    while True:
        counts = np.where(extents > size, -(-extents // size), 0) * (tiles > 0)
        if int((counts * lengths).sum()) * shape.row_bytes <= MAX_PARTIAL_BYTES:
            return size
        size *= 2


class _Pieces(NamedTuple):
    """Ranges of positions (partitions) of sequences, sorted by sequence and position."""

    sequence: Ints
    begin: Ints
    end: Ints


def _splits_in_order(
    lengths: Ints, low: Ints, high: Ints, is_chunk: npt.NDArray[np.bool_], shape: WorkShape
) -> bool:
    """Return whether, with `one_path`, each partition of a chunk becomes an item of its own.

    This is the case if all of the following hold: there are too few row tiles to fill the device,
    a chunk's context has more than one partition, and the partial sums have at most
    MAX_PARTIAL_BYTES.
    """
    tiles = -(-lengths * shape.group // shape.few_rows) * is_chunk
    counts = (-(-high // SPLIT) - low // SPLIT) * is_chunk
    fills = int(tiles.sum()) * shape.num_kv_heads >= shape.few_programs
    fits = int((counts * lengths).sum()) * shape.row_bytes <= MAX_PARTIAL_BYTES
    return bool(counts.max(initial=0) > 1 and fits and not fills)


def _uncut(chosen: npt.NDArray[np.bool_]) -> _Pieces:
    sequence = np.flatnonzero(chosen)
    return _Pieces(sequence, np.zeros_like(sequence), np.full_like(sequence, ALL))


def _cut(low: Ints, high: Ints, chosen: npt.NDArray[np.bool_], size: int) -> _Pieces:
    """Cut the ranges [low, high) of the chosen sequences into partitions of `size` positions.

    The first partition of a sequence begins at a multiple of SPLIT, at or before `low`.
    """
    first = low // SPLIT * SPLIT
    counts = -(-(high - first) // size) * chosen
    sequence = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(sequence)) - (np.cumsum(counts) - counts)[sequence]
    begin = first[sequence] + index * size
    return _Pieces(sequence, begin, begin + size)


def _cut_evenly(low: Ints, high: Ints, tiles: Ints, num_workers: int) -> _Pieces:
    """Divide the ranges [low, high) of all sequences equally among the workers.

    `tiles` is the number of row tiles of each sequence. It is 0 for sequences that are left out,
    and the same number for all other sequences.
    """
    first = low // QUANTUM
    counts = (-(-high // QUANTUM) - first) * (tiles > 0)
    starts = np.concatenate(([0], np.cumsum(counts)))
    total, height = int(starts[-1]), max(1, int(tiles.max(initial=1)))
    quota = max(1, -(-total * height // num_workers) // height)
    cuts = np.union1d(starts[:-1][counts > 0], np.arange(0, total, quota))
    sequence = np.searchsorted(starts, cuts, side="right") - 1
    offset = first[sequence] - starts[sequence]
    ends = np.append(cuts[1:], total)[: len(cuts)]
    return _Pieces(sequence, (cuts + offset) * QUANTUM, (ends + offset) * QUANTUM)


def _partial_rows(
    pieces: _Pieces, lengths: Ints, first_row: int, all_merged: bool
) -> tuple[Ints, Ints, int]:
    """Assign rows of the partial results to the partitions.

    A sequence with only one partition gets such rows only if `all_merged` is set.

    Returns:
        The first row of each partition (-1 if it has none), the array `StepWork.merges`, and the
        next free row.
    """
    counts = np.bincount(pieces.sequence, minlength=len(lengths))
    counts *= counts > (0 if all_merged else 1)
    is_split = counts[pieces.sequence] > 0
    sizes = lengths[pieces.sequence] * is_split
    ends = first_row + np.cumsum(sizes)
    sequence_rows = counts * lengths
    firsts = (first_row + np.cumsum(sequence_rows) - sequence_rows) * (counts > 0)
    rows = np.where(is_split, ends - sizes, -1)
    return rows, np.stack((firsts, counts), 1), first_row + int(sizes.sum())


def _items(pieces: _Pieces, rows: Ints, tiles: Ints) -> Ints32:
    """Return the items [I, 5]: one for each row tile of each partition in `pieces`."""
    counts = tiles[pieces.sequence]
    piece = np.repeat(np.arange(len(counts)), counts)
    tile = np.arange(len(piece)) - (np.cumsum(counts) - counts)[piece]
    columns = (pieces.sequence[piece], tile, pieces.begin[piece], pieces.end[piece], rows[piece])
    return np.stack(columns, 1).astype(np.int32)


def _worker_starts(costs: Ints, num_workers: int) -> Ints32:
    """Return the index of each worker's first item, then the number of items: [num_workers + 1].

    The list of items is divided into ranges of equal cost. A worker gets the items that start in
    the worker's range.
    """
    ends = np.cumsum(costs)
    quota = max(1, -(-int(ends[-1]) // num_workers)) if len(costs) else 1
    worker = (ends - costs) // quota
    return np.searchsorted(worker, np.arange(num_workers + 1)).astype(np.int32)
