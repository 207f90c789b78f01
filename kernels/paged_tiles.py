"""Paged attention on a CPU that reads the cache's blocks where they lie.

See `attention` for what is computed. Compiled by numba, in float32, over a cache of float32 or of
bfloat16 (`widened`). A tile is some consecutive query tokens of one sequence; a tile and KV head is
one piece of work, computed by one thread. Each token is computed in an order that depends on its
own position alone, whatever else is in its tile and in the batch (`tile_rows`). The first use on a
machine compiles for some seconds; the result is kept on disk.
"""

from functools import cache
from typing import Any, TypeAlias

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.compiled import use_threads
from penstock.kernels.lanes import WIDE, ask
from penstock.kernels.tile_rows import (
    score_row,
    score_rows,
    share_row,
    share_rows,
    sum_row,
    sum_rows,
)
from penstock.kernels.widened import bring_rows, float_rows

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Rows: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
"""A cache's, flat: of float32, or the bits of bfloat16."""


@numba.njit(nogil=True)
def _seen(at: int, block_size: int, low: int, high: int) -> tuple[int, int]:
    """Positions of block `at` that are within [low, high)."""
    return max(at * block_size, low), min((at + 1) * block_size, high)


@numba.njit(nogil=True)
def _own(
    at: int, block_size: int, tile: tuple[int, int, int], group: int, row: int
) -> tuple[int, int]:
    """Positions of block `at` that a row of the tile sees."""
    seen = tile[1] + row // group
    return _seen(at, block_size, max(seen - tile[2], 0), seen)


@numba.njit(nogil=True)
def _block_start(table: Ints, at: int, place: tuple[int, int, int]) -> int:
    """The row of the cache where block `at` begins."""
    num_heads, head, block_size = place
    row: int = (table[at] * num_heads + head) * block_size
    return row


@numba.njit(nogil=True)
def _block_at(table: Ints, at: int, place: tuple[int, int, int]) -> int:
    """The row of the cache where position 0 would be, if it were in one row with block `at`."""
    row: int = _block_start(table, at, place) - at * place[2]
    return row


@numba.njit(nogil=True)
def _ask_part(rows: Rows, first: int, count: int, part: int, parts: int) -> None:
    """Has one of so many parts of `count` elements from `first` on brought near.

    A machine foresees no more than a page, and waits where too much is asked for at once.
    """
    line = 64 // rows.itemsize
    num_lines = (count + line - 1) // line
    for at in range(part * num_lines // parts, (part + 1) * num_lines // parts):
        ask(rows, first + at * line)


@numba.njit(nogil=True)
def _one_by_one(
    start: int, tile: tuple[int, int, int], place: tuple[int, int, int], query: Floats,
    rows: Rows, values_at: int, table: Ints, scale: float, cap: float, sinks: Floats,
    slopes: Floats, q: Floats, scores: Floats, powers: Ints, sums: Floats, ones: Floats,
    spare: Floats, scratch: Floats, out: Floats,
) -> None:  # fmt: skip
    """A tile and KV head of a few rows.

    tile: its tokens, from row `start` on; what the first sees; how far back each sees. place: KV
    heads, which of them, block size. sinks, slopes: of the group. q to scratch: room to compute in.
    """
    count, context, behind = tile
    block_size, head = place[2], place[1]
    group, head_dim = len(sinks), query.shape[2]
    padded, span = (head_dim + 7) // 8 * 8, (context + count + 6) // 8 * 8
    lowest, high = max(context - behind, 0), context + count - 1
    blocks, near = (lowest // block_size, (high - 1) // block_size + 1), float_rows(rows, scratch)
    for r in range(count * group):
        whole = query[start + r // group, head * group + r % group]
        q[r * padded : r * padded + head_dim] = whole * scale
        q[r * padded + head_dim : (r + 1) * padded] = 0
    for at in range(blocks[0], blocks[1]):
        row_at = _block_at(table, at, place) * head_dim
        begin, end = _seen(at, block_size, lowest, high)
        row_at = bring_rows(rows, row_at, begin, end, head_dim, scratch)
        # The next block of keys, or the first of values.
        is_last = at + 1 == blocks[1]
        then = blocks[0] if is_last else at + 1
        first = _block_start(table, then, place) * head_dim + (values_at if is_last else 0)
        for r in range(count * group):
            _ask_part(rows, first, block_size * head_dim, r, count * group)
            begin, end = _own(at, block_size, tile, group, r)
            if begin < end:
                score_row(
                    q, r * padded, head_dim, near, row_at, begin, end, scores, r * span, spare
                )
    for r in range(count * group):
        seen, g = context + r // group, r % group
        low = max(seen - behind, 0)
        ones[r] = share_row(scores, r * span, low, seen, cap, slopes[g], sinks[g], powers, spare)
    sums[: count * group * head_dim] = 0
    for at in range(blocks[0], blocks[1]):
        row_at = values_at + _block_at(table, at, place) * head_dim
        begin, end = _seen(at, block_size, lowest, high)
        row_at = bring_rows(rows, row_at, begin, end, head_dim, scratch)
        then = min(at + 1, blocks[1] - 1)
        first = values_at + _block_start(table, then, place) * head_dim
        for r in range(count * group):
            _ask_part(rows, first, block_size * head_dim, r, count * group)
            begin, end = _own(at, block_size, tile, group, r)
            if begin < end:
                sum_row(scores, r * span, near, row_at, begin, end, head_dim, sums, r * head_dim)
    for r in range(count * group):
        whole = out[start + r // group, head * group + r % group]
        whole[:] = sums[r * head_dim : (r + 1) * head_dim] * ones[r]


@numba.njit(nogil=True)
def _together(
    start: int, tile: tuple[int, int, int], place: tuple[int, int, int], query: Floats,
    rows: Rows, values_at: int, table: Ints, scale: float, cap: float, sinks: Floats,
    slopes: Floats, q: Floats, scores: Floats, powers: Ints, sums: Floats, most: Floats,
    totals: Floats, ones: Floats, scratch: Floats, out: Floats,
) -> None:  # fmt: skip
    """The same of many rows, a lane each."""
    count, context, behind = tile
    block_size, head = place[2], place[1]
    group, head_dim = len(sinks), query.shape[2]
    height = (count * group + 2 * WIDE - 1) // (2 * WIDE) * (2 * WIDE)
    low, high = max(context - behind, 0), context + count - 1
    near = float_rows(rows, scratch)
    for r in range(height):
        for i in range(head_dim):
            q[i * height + r] = 0
            if r < count * group:
                x = query[start + r // group, head * group + r % group, i]
                q[i * height + r] = x * scale
    for at in range(low // block_size, (high - 1) // block_size + 1):
        row_at = _block_at(table, at, place) * head_dim
        begin, end = _seen(at, block_size, low, high)
        row_at = bring_rows(rows, row_at, begin, end, head_dim, scratch)
        score_rows(q, height, head_dim, near, row_at, begin, end, scores)
    share_rows(
        scores, height, group, tile, cap, slopes, sinks, powers, most[:height],
        totals[: 8 * height], ones,
    )  # fmt: skip
    sums[: head_dim * height] = 0
    for at in range(low // block_size, (high - 1) // block_size + 1):
        row_at = values_at + _block_at(table, at, place) * head_dim
        begin, end = _seen(at, block_size, low, high)
        row_at = bring_rows(rows, row_at, begin, end, head_dim, scratch)
        sum_rows(scores, height, near, row_at, begin, end, head_dim, sums)
    for r in range(count * group):
        for i in range(head_dim):
            out[start + r // group, head * group + r % group, i] = sums[i * height + r] * ones[r]


def _paged_tiles(
    query: Floats,  # [T, Hq, D]
    rows: Rows,  # [2 N H S D] the cache's
    values_at: int,  # the first element of the values
    num_heads: int,
    block_size: int,
    tables: Ints,  # [B, M]
    tiles: Ints,  # [P, 4] the sequence, the first row, the rows, what the first of them sees
    window: int,  # 0: none
    scale: float,
    cap: float,  # 0: none
    sinks: Floats,  # [Hq]; -inf: none
    slopes: Floats,  # [Hq]; 0: none
    out: Floats,  # [T, Hq, D]
    num_threads: int,
) -> None:
    """Writes the tiles' rows of `out`. Slots that no token of a tile sees are unread."""
    num_tiles, head_dim = len(tiles), query.shape[2]
    group = query.shape[1] // num_heads
    height = (tiles[:, 2].max() * group + 2 * WIDE - 1) // (2 * WIDE) * (2 * WIDE)
    span = ((tiles[:, 3] + tiles[:, 2]).max() + 7) // 8 * 8
    for thread in numba.prange(num_threads):
        scores = np.empty(height * span, np.float32)
        powers = np.empty(max(8 * height, span), np.int32)
        q = np.empty(height * (head_dim + 8), np.float32)
        sums = np.empty(height * head_dim, np.float32)
        most, ones = np.empty(height, np.float32), np.empty(height, np.float32)
        totals, spare = np.empty(8 * height, np.float32), np.zeros(8, np.float32)
        scratch = np.empty(block_size * head_dim, np.float32)
        # Pieces in turns: neighbours in the batch are often alike in length.
        for piece in range(thread, num_tiles * num_heads, num_threads):
            sequence, start, count, context = tiles[piece // num_heads]
            head = piece % num_heads
            own = slice(head * group, (head + 1) * group)
            tile = (count, context, window if window else context + count)
            place = (num_heads, head, block_size)
            if count * group < WIDE:
                _one_by_one(
                    start, tile, place, query, rows, values_at, tables[sequence], scale, cap,
                    sinks[own], slopes[own], q, scores, powers, sums, ones, spare, scratch, out,
                )  # fmt: skip
            else:
                _together(
                    start, tile, place, query, rows, values_at, tables[sequence], scale, cap,
                    sinks[own], slopes[own], q, scores, powers, sums, most, totals, ones,
                    scratch, out,
                )  # fmt: skip


@cache
def paged_tiles(narrow: bool) -> Any:
    """`_paged_tiles` over rows of float32, or narrow ones; compiled when it is first asked for.

    It takes `num_threads` by name, as many as torch has: one pool serves both.
    """
    rows = "uint16" if narrow else "float32"
    signature = (
        f"void(float32[:,:,:], {rows}[::1], int64, int64, int64, int32[:,::1], int32[:,::1], int64,"
        " float32, float32, float32[::1], float32[::1], float32[:,:,::1], int64)"
    )
    kernel: Any = numba.njit(signature, parallel=True, nogil=True, cache=True)(_paged_tiles)

    def run(*arguments: Any, num_threads: int) -> None:
        kernel(*arguments, use_threads(num_threads))

    return run
