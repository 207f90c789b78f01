"""Paged attention on a CPU that reads the cache's blocks where they lie.

See `attention` for what is computed. Compiled by numba, in float32, over a cache of float32 or of
bfloat16 (`cpu_common/bf16`). A tile is some consecutive query tokens of one sequence; a tile and KV
head is one piece of work, computed by one thread. Each token is computed in an order that depends
on its own position alone, whatever else is in its tile and in the batch (`attention/cpu_inner`).
The first use on a machine compiles for some seconds; the result is kept on disk.
"""

from functools import cache
from typing import Any, TypeAlias

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.cpu_inner import (
    pv_row,
    pv_rows,
    qk_row,
    qk_rows,
    softmax_row,
    softmax_rows,
)
from penstock.kernels.cpu_common.bf16 import as_f32, convert_block
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import use_threads
from penstock.kernels.cpu_common.simd import VECTOR_WIDTH

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Rows: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.uint16]
"""A cache's, flat: of float32, or the bits of bfloat16."""

PREFETCHED_BLOCKS = 4
"""Pages that are asked for before they are read; a page is what a block has of one head, of its
keys or of its values. What lies further on is out of a machine's own foresight."""


@inner()
def _visible(at: int, block_size: int, low: int, high: int) -> tuple[int, int]:
    """Positions of block `at` that are within [low, high)."""
    return max(at * block_size, low), min((at + 1) * block_size, high)


@inner()
def _own(
    at: int, block_size: int, tile: tuple[int, int, int], group: int, row: int
) -> tuple[int, int]:
    """Positions of block `at` that a row of the tile sees."""
    seen = tile[1] + row // group
    return _visible(at, block_size, max(seen - tile[2], 0), seen)


@inner()
def _block_start(table: Ints, at: int, kv_layout: tuple[int, int, int]) -> int:
    """The row of the cache where block `at` begins."""
    num_heads, head, block_size = kv_layout
    row: int = (table[at] * num_heads + head) * block_size
    return row


@inner()
def _block_at(table: Ints, at: int, kv_layout: tuple[int, int, int]) -> int:
    """The row of the cache where position 0 would be, if it were in one row with block `at`."""
    row: int = _block_start(table, at, kv_layout) - at * kv_layout[2]
    return row


@inner()
def visible_blocks(tile: tuple[int, int, int], block_size: int) -> tuple[int, int]:
    """The first block that some row of the tile sees, and how many are seen."""
    count, context, behind = tile
    first = max(context - behind, 0) // block_size
    return first, (context + count - 2) // block_size + 1 - first


@inner()
def _page_at(
    number: int, blocks: tuple[int, int], table: Ints, kv_layout: tuple[int, int, int],
    head_dim: int, values_at: int,
) -> int:  # fmt: skip
    """Where a piece's page begins: first come those of its keys, then those of its values; -1: it
    has less."""
    first, count = blocks
    if not 0 <= number < 2 * count:
        return -1
    page = _block_start(table, first + number % count, kv_layout) * head_dim
    return page if number < count else values_at + page


@inner()
def _line_at(page: int, chunk: int, size: int) -> int:
    """Where so many parts of it are passed; -1 where there is no page."""
    return page + chunk * size if page >= 0 else -1


@inner()
def _scale(x: Floats, at: int, count: int, factor: float, out: Floats, out_at: int) -> None:
    """out[out_at + i] = x[at + i] factor, for i below count."""
    for i in range(count):
        out[out_at + i] = x[at + i] * factor


@inner()
def attend_few_rows(
    start: int, tile: tuple[int, int, int], kv_layout: tuple[int, int, int], query: Floats,
    rows: Rows, values_at: int, table: Ints, scale: float, cap: float, sinks: Floats,
    slopes: Floats, q: Floats, scores: Floats, powers: Ints, sums: Floats, ones: Floats,
    spare: Floats, scratch: Floats, out: Floats, next_blocks: tuple[int, int], next_table: Ints,
    next_layout: tuple[int, int, int],
) -> None:  # fmt: skip
    """A tile and KV head of a few rows; after it comes the next one's turn, of which pages are
    asked for meanwhile.

    tile: its tokens, from row `start` on; what the first sees; how far back each sees. kv_layout:
    KV heads, which of them, block size. sinks, slopes: of the group. q to scratch: room to compute
    in.
    """
    count, context, behind = tile
    block_size, head = kv_layout[2], kv_layout[1]
    group, head_dim = len(sinks), query.shape[2]
    padded, span = (head_dim + 7) // 8 * 8, (context + count + 6) // 8 * 8
    lowest, high = max(context - behind, 0), context + count - 1
    blocks, near = visible_blocks(tile, block_size), as_f32(rows, scratch)
    first, last = blocks[0], blocks[0] + blocks[1]
    line = 64 // rows.itemsize
    chunk_size = (block_size * head_dim // (count * group) // line + 1) * line
    for r in range(count * group):
        whole = query[start + r // group, head * group + r % group]
        _scale(whole, 0, head_dim, scale, q, r * padded)
        q[r * padded + head_dim : (r + 1) * padded] = 0
    for at in range(first, last):
        row_at = _block_at(table, at, kv_layout) * head_dim
        begin, end = _visible(at, block_size, lowest, high)
        row_at = convert_block(rows, row_at, begin, end, head_dim, scratch)
        page = _page_at(
            at - first + PREFETCHED_BLOCKS, blocks, table, kv_layout, head_dim, values_at
        )
        for r in range(count * group):
            begin, end = _own(at, block_size, tile, group, r)
            if begin < end:
                ahead = _line_at(page, r, chunk_size)
                qk_row(
                    q, r * padded, head_dim, near, row_at, begin, end, scores, r * span, spare,
                    rows, ahead, chunk_size,
                )  # fmt: skip
    for r in range(count * group):
        seen, g = context + r // group, r % group
        low = max(seen - behind, 0)
        ones[r] = softmax_row(scores, r * span, low, seen, cap, slopes[g], sinks[g], powers, spare)
    sums[: count * group * head_dim] = 0
    for at in range(first, last):
        row_at = values_at + _block_at(table, at, kv_layout) * head_dim
        begin, end = _visible(at, block_size, lowest, high)
        row_at = convert_block(rows, row_at, begin, end, head_dim, scratch)
        number = blocks[1] + at - first + PREFETCHED_BLOCKS
        page = max(
            _page_at(number, blocks, table, kv_layout, head_dim, values_at),
            _page_at(
                number - 2 * blocks[1], next_blocks, next_table, next_layout, head_dim, values_at
            ),
        )
        for r in range(count * group):
            begin, end = _own(at, block_size, tile, group, r)
            if begin < end:
                ahead = _line_at(page, r, chunk_size)
                pv_row(
                    scores, r * span, near, row_at, begin, end, head_dim, sums, r * head_dim,
                    rows, ahead, chunk_size,
                )  # fmt: skip
    for r in range(count * group):
        whole = out[start + r // group, head * group + r % group]
        _scale(sums, r * head_dim, head_dim, ones[r], whole, 0)


@inner()
def attend_many_rows(
    start: int, tile: tuple[int, int, int], kv_layout: tuple[int, int, int], query: Floats,
    rows: Rows, values_at: int, table: Ints, scale: float, cap: float, sinks: Floats,
    slopes: Floats, q: Floats, scores: Floats, powers: Ints, sums: Floats, most: Floats,
    totals: Floats, ones: Floats, scratch: Floats, out: Floats,
) -> None:  # fmt: skip
    """The same of many rows, a lane each."""
    count, context, behind = tile
    block_size, head = kv_layout[2], kv_layout[1]
    group, head_dim = len(sinks), query.shape[2]
    height = (count * group + 2 * VECTOR_WIDTH - 1) // (2 * VECTOR_WIDTH) * (2 * VECTOR_WIDTH)
    low, high = max(context - behind, 0), context + count - 1
    near = as_f32(rows, scratch)
    for r in range(height):
        for i in range(head_dim):
            q[i * height + r] = 0
            if r < count * group:
                x = query[start + r // group, head * group + r % group, i]
                q[i * height + r] = x * scale
    for at in range(low // block_size, (high - 1) // block_size + 1):
        row_at = _block_at(table, at, kv_layout) * head_dim
        begin, end = _visible(at, block_size, low, high)
        row_at = convert_block(rows, row_at, begin, end, head_dim, scratch)
        qk_rows(q, height, head_dim, near, row_at, begin, end, scores)
    softmax_rows(
        scores, height, group, tile, cap, slopes, sinks, powers, most[:height],
        totals[: 8 * height], ones,
    )  # fmt: skip
    sums[: head_dim * height] = 0
    for at in range(low // block_size, (high - 1) // block_size + 1):
        row_at = values_at + _block_at(table, at, kv_layout) * head_dim
        begin, end = _visible(at, block_size, low, high)
        row_at = convert_block(rows, row_at, begin, end, head_dim, scratch)
        pv_rows(scores, height, near, row_at, begin, end, head_dim, sums)
    for r in range(count * group):
        for i in range(head_dim):
            out[start + r // group, head * group + r % group, i] = sums[i * height + r] * ones[r]


@inner()
def _largest(tiles: Ints) -> tuple[int, int]:
    """The most rows that a tile has, and the largest sum of rows and first context."""
    most_rows = most_seen = 0
    for number in range(len(tiles)):
        most_rows = max(most_rows, tiles[number, 2])
        most_seen = max(most_seen, tiles[number, 3] + tiles[number, 2])
    return most_rows, most_seen


def _paged_attention(
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
    most_rows, most_seen = _largest(tiles)
    height = (most_rows * group + 2 * VECTOR_WIDTH - 1) // (2 * VECTOR_WIDTH) * (2 * VECTOR_WIDTH)
    span = (most_seen + 7) // 8 * 8
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
            kv_layout = (num_heads, head, block_size)
            if count * group < VECTOR_WIDTH:
                then = min(piece + num_threads, num_tiles * num_heads - 1)
                other, _, next_count, next_context = tiles[then // num_heads]
                next_tile = (next_count, next_context, window if window else 1 << 30)
                attend_few_rows(
                    start, tile, kv_layout, query, rows, values_at, tables[sequence], scale, cap,
                    sinks[own], slopes[own], q, scores, powers, sums, ones, spare, scratch, out,
                    visible_blocks(next_tile, block_size), tables[other],
                    (num_heads, then % num_heads, block_size),
                )  # fmt: skip
            else:
                attend_many_rows(
                    start, tile, kv_layout, query, rows, values_at, tables[sequence], scale, cap,
                    sinks[own], slopes[own], q, scores, powers, sums, most, totals, ones,
                    scratch, out,
                )  # fmt: skip


@cache
def compile_paged_attention(narrow: bool) -> Any:
    """`_paged_attention` over rows of float32, or narrow ones; compiled when it is first asked for.

    It takes `num_threads` by name, as many as torch has: one pool serves both.
    """
    rows = "uint16" if narrow else "float32"
    signature = (
        f"void(float32[:,:,:], {rows}[::1], int64, int64, int64, int32[:,::1], int32[:,::1], int64,"
        " float32, float32, float32[::1], float32[::1], float32[:,:,::1], int64)"
    )
    kernel: Any = numba.njit(signature, parallel=True, nogil=True, cache=True)(_paged_attention)

    def run(*arguments: Any, num_threads: int) -> None:
        kernel(*arguments, use_threads(num_threads))

    return run
