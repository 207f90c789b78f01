"""Paged attention on a CPU that reads the cache's blocks where they lie.

See `attention` for what is computed. Compiled by numba for float32. A tile is a few consecutive
query tokens of one sequence: it shares what it reads of a block. A tile and KV head is one piece of
work, computed by one thread; each of its tokens is computed in an order that depends on its own
position alone, whatever else is in the tile and in the batch. The first import on a machine
compiles for some seconds; the result is kept on disk.
"""

import math
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]

# Sums may be taken in vector lanes. Neither infinities nor NaN may be reasoned away.
_LOOSE = {"reassoc", "contract", "nsz"}

_f32 = np.float32
_LOG2_E = _f32(math.log2(math.e))
# exp(x ln 2) between -1/2 and 1/2: its Taylor series, right to the last bit but one.
_C1, _C2, _C3, _C4, _C5, _C6, _C7 = (
    _f32(math.log(2) ** n / math.factorial(n)) for n in range(1, 8)
)


@numba.njit(fastmath=_LOOSE, nogil=True, cache=True)
def _exp(x: Floats, powers: Ints) -> None:
    """x = e^x in place, in vectors; for x <= 0. `powers` is scratch, as long as x."""
    factors = powers.view(np.float32)
    for i in range(len(x)):
        t = x[i] * _LOG2_E
        if t < _f32(-126):  # not max(), which could lose a NaN
            t = _f32(-126)
        n = np.floor(t + _f32(0.5))
        f = t - n
        powers[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
        p = _C4 + f * (_C5 + f * (_C6 + f * _C7))
        x[i] = _f32(1) + f * (_C1 + f * (_C2 + f * (_C3 + f * p)))
    for i in range(len(x)):
        x[i] *= factors[i]


@numba.njit(fastmath=_LOOSE, nogil=True, cache=True)
def _products(
    q: Floats, top: int, stop: int, rows: Floats, row: int, count: int, scores: Floats, at: int
) -> None:
    """scores[top : stop, at : at + count] = q[top : stop] rows[row : row + count].

    No slices: they cost more.
    """
    head_dim = q.shape[1]
    whole = count - count % 4
    for g in range(top, stop):
        for s in range(0, whole, 4):
            a = b = c = d = _f32(0)
            for i in range(head_dim):
                a += q[g, i] * rows[row + s, i]
                b += q[g, i] * rows[row + s + 1, i]
                c += q[g, i] * rows[row + s + 2, i]
                d += q[g, i] * rows[row + s + 3, i]
            scores[g, at + s], scores[g, at + s + 1] = a, b
            scores[g, at + s + 2], scores[g, at + s + 3] = c, d
        for s in range(whole, count):
            a = _f32(0)
            for i in range(head_dim):
                a += q[g, i] * rows[row + s, i]
            scores[g, at + s] = a


@numba.njit(fastmath=_LOOSE, nogil=True, cache=True)
def _add_values(
    shares: Floats, at: int, rows: Floats, row: int, count: int, top: int, stop: int, sums: Floats
) -> None:
    """sums[top : stop] += shares[top : stop, at : at + count] rows[row : row + count]."""
    head_dim = sums.shape[1]
    whole = count - count % 4
    for g in range(top, stop):
        for s in range(0, whole, 4):
            a, b = shares[g, at + s], shares[g, at + s + 1]
            c, d = shares[g, at + s + 2], shares[g, at + s + 3]
            for i in range(head_dim):
                sums[g, i] += (a * rows[row + s, i] + b * rows[row + s + 1, i]) + (
                    c * rows[row + s + 2, i] + d * rows[row + s + 3, i]
                )
        for s in range(whole, count):
            a = shares[g, at + s]
            for i in range(head_dim):
                sums[g, i] += a * rows[row + s, i]


@numba.njit(fastmath=_LOOSE, nogil=True, cache=True)
def _bend(scores: Floats, cap: float, slope: float) -> None:
    """In place; the last score is the token's own."""
    if cap > 0:
        for i in range(len(scores)):
            scores[i] = cap * math.tanh(scores[i] / cap)
    if slope != 0:
        for i in range(len(scores)):
            scores[i] += slope * _f32(i + 1 - len(scores))


@numba.njit(fastmath=_LOOSE, nogil=True, cache=True)
def _normalise(scores: Floats, powers: Ints, sink: float) -> None:
    """Scores to shares, in place."""
    most = sink
    for i in range(len(scores)):
        if scores[i] > most:
            most = scores[i]
    for i in range(len(scores)):
        scores[i] -= most
    _exp(scores, powers)
    total = _f32(0)
    for i in range(len(scores)):
        total += scores[i]
    if sink > -np.inf:
        total += _f32(math.exp(sink - most))
    one = _f32(1) / total
    for i in range(len(scores)):
        scores[i] *= one


@numba.njit(fastmath=_LOOSE, nogil=True, cache=True)
def _seen(at: int, block_size: int, seen: int, behind: int) -> tuple[int, int]:
    """Positions of block `at` that a token sees: of the `behind` ones below `seen`."""
    return max(at * block_size, seen - behind), min((at + 1) * block_size, seen)


@numba.njit(fastmath=_LOOSE, nogil=True, cache=True)
def _score(
    q: Floats,
    rows: Floats,
    table: Ints,
    blocks: tuple[int, int],
    place: tuple[int, int, int],
    tile: tuple[int, int, int],
    scores: Floats,
) -> None:
    """Scores of a tile, block by block: every token of the tile that sees it reads it in turn."""
    num_heads, head, block_size = place
    count, context, behind = tile
    group = len(q) // count
    for at in range(blocks[0], blocks[1]):
        row = (table[at] * num_heads + head) * block_size - at * block_size
        for r in range(count):
            begin, end = _seen(at, block_size, context + r, behind)
            if begin < end:
                top = r * group
                _products(q, top, top + group, rows, row + begin, end - begin, scores, begin)


@numba.njit(fastmath=_LOOSE, nogil=True, cache=True)
def _sum(
    scores: Floats,
    rows: Floats,
    table: Ints,
    blocks: tuple[int, int],
    place: tuple[int, int, int],
    tile: tuple[int, int, int],
    values_at: int,
    sums: Floats,
) -> None:
    """Sums of values of a tile, likewise."""
    num_heads, head, block_size = place
    count, context, behind = tile
    group = len(sums) // count
    for at in range(blocks[0], blocks[1]):
        row = values_at + (table[at] * num_heads + head) * block_size - at * block_size
        for r in range(count):
            begin, end = _seen(at, block_size, context + r, behind)
            if begin < end:
                top = r * group
                _add_values(scores, begin, rows, row + begin, end - begin, top, top + group, sums)


@numba.njit(fastmath=_LOOSE, nogil=True, cache=True)
def _attend(
    start: int,
    tile: tuple[int, int, int],
    place: tuple[int, int, int],
    query: Floats,
    rows: Floats,
    values_at: int,
    table: Ints,
    scale: float,
    cap: float,
    sinks: Floats,
    slopes: Floats,
    q: Floats,
    scores: Floats,
    powers: Ints,
    sums: Floats,
    out: Floats,
) -> None:
    """One tile and KV head.

    tile: its tokens, from row `start` on; what the first sees; how far back each sees. place: KV
    heads, which of them, block size. q, scores, powers, sums: scratch.
    """
    count, context, behind = tile
    block_size = place[2]
    group = len(q) // count
    first = place[1] * group
    for r in range(count):
        q[r * group : (r + 1) * group] = query[start + r, first : first + group] * scale
    sums[:] = 0
    last = context + count - 1
    blocks = max(context - behind, 0) // block_size, (last - 1) // block_size + 1
    _score(q, rows, table, blocks, place, tile, scores)
    for g in range(len(q)):
        seen = context + g // group
        low = max(seen - behind, 0)
        head = first + g % group
        _bend(scores[g, low:seen], cap, slopes[head])
        _normalise(scores[g, low:seen], powers[low:seen], sinks[head])
    _sum(scores, rows, table, blocks, place, tile, values_at, sums)
    for r in range(count):
        out[start + r, first : first + group] = sums[r * group : (r + 1) * group]


_SIGNATURE = (
    "void(float32[:,:,:], float32[:,::1], int64, int64, int64, int32[:,::1], int32[:,::1], int64,"
    " float32, float32, float32[::1], float32[::1], float32[:,:,::1], int64)"
)


@numba.njit(_SIGNATURE, fastmath=_LOOSE, parallel=True, nogil=True, cache=True)
def _paged_tiles(
    query: Floats,  # [T, Hq, D]
    rows: Floats,  # [2 N H S, D] the cache's
    values_at: int,  # the first row of the values
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
    """Writes the tiles' rows of `out`. Slots that a token does not see are unread."""
    num_tiles, head_dim = len(tiles), query.shape[2]
    group = query.shape[1] // num_heads
    height = tiles[:, 2].max() * group
    longest = (tiles[:, 3] + tiles[:, 2]).max()
    for thread in numba.prange(num_threads):
        scores = np.empty((height, longest), np.float32)
        powers = np.empty(longest, np.int32)
        q = np.empty((height, head_dim), np.float32)
        sums = np.empty((height, head_dim), np.float32)
        # Pieces in turns: neighbours in the batch are often alike in length.
        for piece in range(thread, num_tiles * num_heads, num_threads):
            sequence, start, count, context = tiles[piece // num_heads]
            tall = count * group
            behind = window if window else context + count
            _attend(
                start, (count, context, behind), (num_heads, piece % num_heads, block_size),
                query, rows, values_at, tables[sequence], scale, cap, sinks,
                slopes, q[:tall], scores[:tall], powers, sums[:tall], out,
            )  # fmt: skip


def paged_tiles(*arguments: Any, num_threads: int) -> None:
    """`_paged_tiles` in so many threads, as many as torch has: one pool serves both."""
    num_threads = min(num_threads, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if numba.get_num_threads() != num_threads:
        numba.set_num_threads(num_threads)
    kernel: Any = _paged_tiles
    kernel(*arguments, num_threads)
