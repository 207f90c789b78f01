"""Paged attention of single query tokens on a CPU, reading the cache's blocks where they lie.

See `attention` for what is computed. Compiled by numba for float32; one sequence and KV head is one
piece of work, computed from start to end by one thread and in one order, whatever else is in
the batch. The first import on a machine compiles for some seconds; the result is kept on disk.
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
def _products(q: Floats, rows: Floats, row: int, count: int, scores: Floats, at: int) -> None:
    """scores[:, at : at + count] = q [G, D] rows[row : row + count]. No slices: they cost more."""
    group, head_dim = q.shape
    whole = count - count % 4
    for g in range(group):
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
def _add_values(shares: Floats, at: int, rows: Floats, row: int, count: int, sums: Floats) -> None:
    """sums [G, D] += shares[:, at : at + count] rows[row : row + count]."""
    group, head_dim = sums.shape
    whole = count - count % 4
    for g in range(group):
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
def _attend(
    b: int,
    head: int,
    query: Floats,
    rows: Floats,
    num_blocks: int,
    num_heads: int,
    block_size: int,
    table: Ints,
    context: int,
    low: int,
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
    """One sequence and KV head: positions [low, context). q, scores, powers, sums: scratch."""
    group, head_dim = q.shape
    first = head * group
    for g in range(group):
        for i in range(head_dim):
            q[g, i] = query[b, first + g, i] * scale
            sums[g, i] = 0
    for at in range(low // block_size, (context - 1) // block_size + 1):
        begin, end = max(at * block_size, low), min((at + 1) * block_size, context)
        row = (table[b, at] * num_heads + head) * block_size + begin - at * block_size
        _products(q, rows, row, end - begin, scores, begin)
    for g in range(group):
        seen = scores[g, low:context]
        _bend(seen, cap, slopes[first + g])
        _normalise(seen, powers[low:context], sinks[first + g])
    for at in range(low // block_size, (context - 1) // block_size + 1):
        begin, end = max(at * block_size, low), min((at + 1) * block_size, context)
        block = num_blocks + table[b, at]
        row = (block * num_heads + head) * block_size + begin - at * block_size
        _add_values(scores, begin, rows, row, end - begin, sums)
    for g in range(group):
        for i in range(head_dim):
            out[b, first + g, i] = sums[g, i]


_SIGNATURE = (
    "void(float32[:,:,:], float32[:,::1], int64, int64, int64, int32[:,::1], int32[::1], int64,"
    " float32, float32, float32[::1], float32[::1], float32[:,:,::1], int64)"
)


@numba.njit(_SIGNATURE, fastmath=_LOOSE, parallel=True, nogil=True, cache=True)
def _paged_decode(
    query: Floats,  # [B, Hq, D]
    rows: Floats,  # [2 N H S, D] the cache's
    num_blocks: int,
    num_heads: int,
    block_size: int,
    tables: Ints,  # [B, M]
    contexts: Ints,  # [B] positions, the query's own included
    window: int,  # 0: none
    scale: float,
    cap: float,  # 0: none
    sinks: Floats,  # [Hq]; -inf: none
    slopes: Floats,  # [Hq]; 0: none
    out: Floats,  # [B, Hq, D]
    num_threads: int,
) -> None:
    """Writes `out`. Blocks past a context, and slots that a sequence does not see, are unread."""
    batch, num_query_heads, head_dim = query.shape
    group = num_query_heads // num_heads
    longest = contexts.max()
    for thread in numba.prange(num_threads):
        scores = np.empty((group, longest), np.float32)
        powers = np.empty(longest, np.int32)
        q = np.empty((group, head_dim), np.float32)
        sums = np.empty((group, head_dim), np.float32)
        # Pieces in turns: neighbours in the batch are often alike in length.
        for piece in range(thread, batch * num_heads, num_threads):
            b = piece // num_heads
            context = contexts[b]
            _attend(
                b, piece % num_heads, query, rows, num_blocks, num_heads, block_size, tables,
                context, max(context - window, 0) if window else 0, scale, cap, sinks,
                slopes, q, scores, powers, sums, out,
            )  # fmt: skip


def paged_decode(*arguments: Any, num_threads: int) -> None:
    """`_paged_decode` in so many threads, as many as torch has: one pool serves both."""
    num_threads = min(num_threads, numba.config.NUMBA_NUM_THREADS)  # type: ignore[attr-defined]
    if numba.get_num_threads() != num_threads:
        numba.set_num_threads(num_threads)
    kernel: Any = _paged_decode
    kernel(*arguments, num_threads)
