"""CPU kernel of paged attention. The kernel reads the blocks of the KV cache in place.

See `attention/op` for the operation and for the letters of shapes. The loops are compiled by numba
and use float32 arithmetic over a cache of any format (`kv_cache/cpu_blocks`). Compiling takes some
seconds, but only once per machine, because the compiled code is cached on disk.

A tile is a range of consecutive query tokens of one sequence. A work item is a tile and a KV head;
one thread computes each work item. A query row is one token and one query head of the work item.
The order in which a token's sums are computed depends only on the token's position, not on the
other tokens of the token's tile or batch (`attention/cpu_inner`). Over a bfloat16 or INT8 cache of
suitable sizes, CPUs with AMX use other loops (`attention/cpu_amx`).
"""

from functools import cache
from typing import Any, TypeAlias

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.cpu_amx.attend import (
    amx_scratch_size,
    attend_with_amx,
    count_starts,
    release_amx,
)
from penstock.kernels.attention.cpu_inner import (
    add_chunk,
    add_previous_chunk,
    pv_row,
    pv_rows,
    qk_row,
    qk_rows,
    softmax_row,
    softmax_rows,
)
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import compile_function, use_threads
from penstock.kernels.cpu_common.simd import VECTOR_WIDTH
from penstock.kernels.kv_cache.cpu_blocks import as_f32, convert_block, page_size

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Rows: TypeAlias = npt.NDArray[Any]
"""The KV cache as a flat array, with one of the dtypes of `kv_cache/cpu_blocks`."""

PREFETCHED_BLOCKS = 4
"""Prefetch distance in pages. A page contains the keys or the values of one KV head and one block.
The hardware prefetcher cannot predict the address of the next page, because the address depends on
the block table."""


@inner()
def _visible(at: int, block_size: int, low: int, high: int) -> tuple[int, int]:
    """Return the range (begin, end) of the positions of block `at` that are within [low, high).

    `at` is the number of the block in its sequence.
    """
    return max(at * block_size, low), min((at + 1) * block_size, high)


@inner()
def _own(
    at: int, block_size: int, tile: tuple[int, int, int], group: int, row: int
) -> tuple[int, int]:
    """Return the range (begin, end) of the positions of block `at` that one query row attends to.

    `row` is the number of the query row within the tile.
    """
    seen = tile[1] + row // group
    return _visible(at, block_size, max(seen - tile[2], 0), seen)


@inner()
def _page_of(table: Ints, at: int, kv_layout: tuple[int, int, int], size: int) -> int:
    """Return the index in the flat cache of the key page of block `at` of a sequence.

    A page has `size` elements.
    """
    page: int = (table[at] * kv_layout[0] + kv_layout[1]) * size
    return page


@inner()
def visible_blocks(tile: tuple[int, int, int], block_size: int) -> tuple[int, int]:
    """Return the first block that any row of the tile attends to, and the number of such blocks."""
    count, context, behind = tile
    first = max(context - behind, 0) // block_size
    return first, (context + count - 2) // block_size + 1 - first


@inner()
def _page_at(
    number: int, blocks: tuple[int, int], table: Ints, kv_layout: tuple[int, int, int],
    size: int, values_at: int,
) -> int:  # fmt: skip
    """Return where page `number` of a work item starts in the flat cache.

    The result is -1 if there is no page with this number. `blocks` is the result of
    `visible_blocks`. The first pages are the keys of these blocks, and the other pages are the
    values. A page has `size` elements.
    """
    first, count = blocks
    if not 0 <= number < 2 * count:
        return -1
    page = _page_of(table, first + number % count, kv_layout, size)
    return page if number < count else values_at + page


@inner()
def _line_at(page: int, chunk: int, size: int) -> int:
    """Return the index in the flat cache of part number `chunk` of a page.

    Each part has `size` elements. `page` is the index of the page, or -1 if there is no page. In
    the latter case, the result is -1.
    """
    return page + chunk * size if page >= 0 else -1


@inner()
def _scale(x: Floats, at: int, count: int, factor: float, out: Floats, out_at: int) -> None:
    """Compute `out[out_at + i] = x[at + i] * factor` for i in [0, count)."""
    for i in range(count):
        out[out_at + i] = x[at + i] * factor


@inner()
def attend_few_rows(
    start: int, tile: tuple[int, int, int], kv_layout: tuple[int, int, int], query: Floats,
    rows: Rows, values_at: int, table: Ints, scale: float, cap: float, sinks: Floats,
    slopes: Floats, q: Floats, scores: Floats, sums: Floats, ones: Floats,
    spare: Floats, scratch: Floats, out: Floats, next_blocks: tuple[int, int], next_table: Ints,
    next_layout: tuple[int, int, int],
) -> None:  # fmt: skip
    """Compute attention for a tile with few query rows and one KV head, one query row at a time.

    The loops also prefetch the pages that are read next. Near the end of this work item, these are
    the first pages of the next one.

    Args:
        start: index in `query` of the tile's first token.
        tile: (number of tokens, context length of the first token, window).
        kv_layout: (number of KV heads, index of this KV head, block size).
        query: [T, Hq, D].
        rows: the cache as a flat array.
        values_at: index in `rows` at which the values begin.
        table: [M] block table of the sequence.
        scale: factor of the scores.
        cap: soft cap of the scores; 0 for none.
        sinks: [G] sinks of the query heads that read this KV head; -inf for none.
        slopes: [G] ALiBi slopes of the query heads that read this KV head; 0 for none.
        q, scores, sums, ones, spare, scratch: scratch buffers; `sums` has two halves.
        out: [T, Hq, D] result.
        next_blocks: `visible_blocks` of the next work item.
        next_table: block table of the next work item.
        next_layout: `kv_layout` of the next work item.
    """
    count, context, behind = tile
    block_size, head = kv_layout[2], kv_layout[1]
    group, head_dim = len(sinks), query.shape[2]
    padded, span = (head_dim + 7) // 8 * 8, (context + count + 6) // 8 * 8
    lowest, high = max(context - behind, 0), context + count - 1
    blocks, near = visible_blocks(tile, block_size), as_f32(rows, scratch)
    first, last = blocks[0], blocks[0] + blocks[1]
    line, size = 64 // rows.itemsize, page_size(rows, block_size, head_dim)
    chunk_size = (size // (count * group) // line + 1) * line
    for r in range(count * group):
        whole = query[start + r // group, head * group + r % group]
        _scale(whole, 0, head_dim, scale, q, r * padded)
        q[r * padded + head_dim : (r + 1) * padded] = 0
    for at in range(first, last):
        keys = _page_of(table, at, kv_layout, size)
        begin, end = _visible(at, block_size, lowest, high)
        row_at = convert_block(
            rows, keys, at * block_size, begin, end, block_size, head_dim, scratch
        )
        page = _page_at(at - first + PREFETCHED_BLOCKS, blocks, table, kv_layout, size, values_at)
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
        ones[r] = softmax_row(scores, r * span, low, seen, cap, slopes[g], sinks[g], spare)
    half = count * group * head_dim
    sums[: 2 * half] = 0
    for at in range(first, last):
        add_previous_chunk(at, block_size, sums, half)
        values = values_at + _page_of(table, at, kv_layout, size)
        begin, end = _visible(at, block_size, lowest, high)
        row_at = convert_block(
            rows, values, at * block_size, begin, end, block_size, head_dim, scratch
        )
        number = blocks[1] + at - first + PREFETCHED_BLOCKS
        page = max(
            _page_at(number, blocks, table, kv_layout, size, values_at),
            _page_at(number - 2 * blocks[1], next_blocks, next_table, next_layout, size, values_at),
        )
        for r in range(count * group):
            begin, end = _own(at, block_size, tile, group, r)
            if begin < end:
                ahead = _line_at(page, r, chunk_size)
                pv_row(
                    scores, r * span, near, row_at, begin, end, head_dim, sums, r * head_dim,
                    rows, ahead, chunk_size,
                )  # fmt: skip
    add_chunk(sums, half, half)
    for r in range(count * group):
        whole = out[start + r // group, head * group + r % group]
        _scale(sums, half + r * head_dim, head_dim, ones[r], whole, 0)


@inner()
def attend_many_rows(
    start: int, tile: tuple[int, int, int], kv_layout: tuple[int, int, int], query: Floats,
    rows: Rows, values_at: int, table: Ints, scale: float, cap: float, sinks: Floats,
    slopes: Floats, q: Floats, scores: Floats, sums: Floats, most: Floats,
    totals: Floats, ones: Floats, scratch: Floats, out: Floats,
) -> None:  # fmt: skip
    """Compute attention for a tile with many query rows and one KV head, one row per vector lane.

    The arguments are those of `attend_few_rows`, except that `most` and `totals` are two more
    scratch buffers. This function does not prefetch.
    """
    count, context, behind = tile
    block_size, head = kv_layout[2], kv_layout[1]
    group, head_dim = len(sinks), query.shape[2]
    height = (count * group + 2 * VECTOR_WIDTH - 1) // (2 * VECTOR_WIDTH) * (2 * VECTOR_WIDTH)
    low, high = max(context - behind, 0), context + count - 1
    near, size = as_f32(rows, scratch), page_size(rows, block_size, head_dim)
    for r in range(height):
        for i in range(head_dim):
            q[i * height + r] = 0
            if r < count * group:
                x = query[start + r // group, head * group + r % group, i]
                q[i * height + r] = x * scale
    for at in range(low // block_size, (high - 1) // block_size + 1):
        keys = _page_of(table, at, kv_layout, size)
        begin, end = _visible(at, block_size, low, high)
        row_at = convert_block(
            rows, keys, at * block_size, begin, end, block_size, head_dim, scratch
        )
        qk_rows(q, height, head_dim, near, row_at, begin, end, scores)
    softmax_rows(
        scores, height, group, tile, cap, slopes, sinks, most[:height],
        totals[: 16 * height], ones,
    )  # fmt: skip
    half = head_dim * height
    sums[: 2 * half] = 0
    for at in range(low // block_size, (high - 1) // block_size + 1):
        add_previous_chunk(at, block_size, sums, half)
        values = values_at + _page_of(table, at, kv_layout, size)
        begin, end = _visible(at, block_size, low, high)
        row_at = convert_block(
            rows, values, at * block_size, begin, end, block_size, head_dim, scratch
        )
        pv_rows(scores, height, near, row_at, begin, end, head_dim, sums)
    add_chunk(sums, half, half)
    for r in range(count * group):
        for i in range(head_dim):
            found = sums[half + i * height + r]
            out[start + r // group, head * group + r % group, i] = found * ones[r]


@inner()
def _largest(tiles: Ints) -> tuple[int, int]:
    """Return the largest number of tokens of a tile, and an upper bound of all context lengths.

    The bound is the maximum, over all tiles, of the tile's number of tokens plus the context length
    of its first token.
    """
    most_rows = most_seen = 0
    for number in range(len(tiles)):
        most_rows = max(most_rows, tiles[number, 2])
        most_seen = max(most_seen, tiles[number, 3] + tiles[number, 2])
    return most_rows, most_seen


def _paged_attention(
    query: Floats,  # [T, Hq, D]
    rows: Rows,  # the cache as a flat array
    values_at: int,  # index in `rows` at which the values begin
    num_heads: int,
    block_size: int,
    tables: Ints,  # [B, M] block tables
    # [P, 4] int32, one row per tile: number of the sequence, index in `query` of the tile's first
    # token, number of tokens, context length of the first token.
    tiles: Ints,
    window: int,  # number of positions that a token attends to; 0 means all
    scale: float,  # factor of the scores
    cap: float,  # soft cap of the scores; 0 if there is none
    sinks: Floats,  # [Hq] sink of each query head; -inf if the head has none
    slopes: Floats,  # [Hq] ALiBi slope of each query head; 0 if the head has none
    out: Floats,  # [T, Hq, D] result
    num_threads: int,
) -> None:
    """Compute attention for all tiles and write the results of their tokens to `out`.

    Slots to which no token attends may contain anything.
    """
    num_tiles, head_dim = len(tiles), query.shape[2]
    group = query.shape[1] // num_heads
    most_rows, most_seen = _largest(tiles)
    height = (most_rows * group + 2 * VECTOR_WIDTH - 1) // (2 * VECTOR_WIDTH) * (2 * VECTOR_WIDTH)
    span = (most_seen + 7) // 8 * 8
    for thread in numba.prange(num_threads):
        scores = np.empty(height * span, np.float32)
        q = np.empty(height * (head_dim + 8), np.float32)
        sums = np.empty(2 * height * head_dim, np.float32)
        most, ones = np.empty(height, np.float32), np.empty(height, np.float32)
        totals, spare = np.empty(16 * height, np.float32), np.zeros(8, np.float32)
        scratch = np.empty(block_size * head_dim, np.float32)
        amx_size = amx_scratch_size(rows, most_rows * group, most_seen, head_dim)
        amx_scratch = np.empty(amx_size + 16, np.float32)
        starts, shapes = np.empty(count_starts(most_seen), np.int64), np.zeros(64, np.uint8)
        amx_scratch = amx_scratch[-amx_scratch.ctypes.data % 64 // 4 :]
        # Round-robin balances the load, because neighbouring sequences often have similar lengths.
        for piece in range(thread, num_tiles * num_heads, num_threads):
            sequence, start, count, context = tiles[piece // num_heads]
            head = piece % num_heads
            own = slice(head * group, (head + 1) * group)
            tile = (count, context, window if window else context + count)
            kv_layout = (num_heads, head, block_size)
            then = min(piece + num_threads, num_tiles * num_heads - 1)
            other, _, next_count, next_context = tiles[then // num_heads]
            next_tile = (next_count, next_context, window if window else 1 << 30)
            next_layout = (num_heads, then % num_heads, block_size)
            if attend_with_amx(
                start, tile, kv_layout, query, rows, values_at, tables[sequence], scale, cap,
                sinks[own], slopes[own], amx_scratch, starts, shapes, out, next_tile, next_layout,
                tables[other],
            ):  # fmt: skip
                continue
            if count * group < VECTOR_WIDTH:
                attend_few_rows(
                    start, tile, kv_layout, query, rows, values_at, tables[sequence], scale, cap,
                    sinks[own], slopes[own], q, scores, sums, ones, spare, scratch, out,
                    visible_blocks(next_tile, block_size), tables[other], next_layout,
                )  # fmt: skip
            else:
                attend_many_rows(
                    start, tile, kv_layout, query, rows, values_at, tables[sequence], scale, cap,
                    sinks[own], slopes[own], q, scores, sums, most, totals, ones,
                    scratch, out,
                )  # fmt: skip
        release_amx(rows)


@cache
def compile_paged_attention(rows: str) -> Any:
    """Compile `_paged_attention` for a cache whose flat array has numba's dtype `rows`.

    The returned function takes the arguments of `_paged_attention`. Callers must pass torch's
    number of threads as the keyword argument `num_threads`, because numba and torch share one
    OpenMP pool.
    """
    signature = (
        f"void(float32[:,:,:], {rows}[::1], int64, int64, int64, int32[:,::1], int32[:,::1], int64,"
        " float32, float32, float32[::1], float32[::1], float32[:,:,::1], int64)"
    )
    kernel = compile_function(_paged_attention, signature, parallel=True)

    def run(*arguments: Any, num_threads: int) -> None:
        kernel(*arguments, use_threads(num_threads))

    return run
