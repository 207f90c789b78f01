"""Inner loops of `cpu_paged`: scores, softmax weights and weighted sums of values.

Shapes: G query heads per KV head, D features per head. A query row is one token and query head.

Each loop has a version for few query rows (`qk_row`, `softmax_row`, `pv_row`) and a version for
many (`qk_rows`, `softmax_rows`, `pv_rows`). The two versions compute every sum in the same order,
so their results are bitwise identical:

- A score is the sum of eight partial sums. Partial sum a_j adds the products of the features j,
  j + 8, j + 16, ... in this order, with fused multiply-adds. With h_j = a_j + a_(j + 4), the score
  is ((h_0 + h_1) + h_2) + h_3. The softmax weights are summed in the same way, over positions
  instead of features.
- The weighted values are summed in order of position. At the end, the sum is multiplied by
  1 / (sum of the weights).
- Sums over positions have two levels, because the rounding error of a float32 sum grows with its
  number of terms. Each chunk of `SUM_POSITIONS` positions has a sum of its own, and these sums are
  added in order. The chunks do not depend on the other rows of a tile: they begin at multiples of
  `SUM_POSITIONS`. For the values, a block belongs to the chunk that contains its first position.

The version for few rows computes one row at a time, with the eight partial sums in the lanes of a
vector. The version for many rows computes one row per lane. The latter is faster, because it never
adds the lanes of one vector to each other.
"""

# mypy: disable-error-code="no-untyped-call"

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.exponential import exp
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.simd import (
    VECTOR_WIDTH,
    broadcast_load,
    fma,
    hsum,
    hsum4,
    load8,
    load_wide,
    prefetch,
    splat8,
    splat_wide,
    store,
    vadd,
    vmax,
)

Floats = npt.NDArray[np.float32]

FASTMATH = {"contract"}
"""Fast-math flags: allow only fused multiply-adds, which LLVM forms the same way every time."""

SUM_POSITIONS = 1024
"""Number of positions of a chunk of a sum over positions; a multiple of 8. If all terms are
positive, the relative error of a sum over n positions is at most about
(SUM_POSITIONS + block size + n / SUM_POSITIONS) * 2**-24."""

_f32 = np.float32


@inner(fastmath=FASTMATH)
def apply_score_mod(score: Any, cap: float, slope: Any, distance: int) -> Any:
    """Return `score` after the soft cap (if `cap` > 0) and the ALiBi slope (if not 0).

    `distance` (<= 0) is the position of the key minus the position of the query.
    """
    if cap > 0:
        score = cap * math.tanh(score / cap)
    if slope != 0:
        score += slope * _f32(distance)
    return score


@inner(fastmath=FASTMATH)
def one_over(total: Any, most: float, sink: float) -> Any:
    """Return the factor 1 / (`total` + weight of the sink) that normalizes a row's softmax weights.

    `total` is the sum of the weights, and `most` is the largest score of the row. A `sink` of -inf
    means that there is no sink.
    """
    if sink > -np.inf:
        total += _f32(math.exp(sink - most))
    return _f32(1) / total


@inner()
def add_chunk(sums: Floats, half: int, count: int) -> None:
    """Add the first `count` elements of `sums` to those from index `half` on, and set them to 0.

    The first half of `sums` has the sums of the present chunk, and the second half those of the
    chunks before.
    """
    for i in range(count):
        sums[half + i] += sums[i]
        sums[i] = 0


@inner()
def add_previous_chunk(at: int, block_size: int, sums: Floats, half: int) -> None:
    """Call `add_chunk` if block number `at` of a sequence is the first block of a chunk."""
    if at * block_size // SUM_POSITIONS != (at - 1) * block_size // SUM_POSITIONS:
        add_chunk(sums, half, half)


@inner()
def _load_tail(rows: Floats, at: int, count: int, spare: Floats) -> Any:
    """Load `count` < 8 elements from `rows[at:]` into a vector of 8 lanes; the other lanes are 0.

    `spare` is a scratch array of 8 elements. Its elements from `count` on must be 0.
    """
    for i in range(count):
        spare[i] = rows[at + i]
    return load8(spare, 0)


@inner()
def _prefetch(later: Any, ahead: int, size: int) -> None:
    """Prefetch the elements [ahead, ahead + size) of `later`, unless `ahead` is -1."""
    if ahead >= 0:
        for i in range(ahead, ahead + size, 64 // later.itemsize):
            prefetch(later, i)


@inner()
def _partial_scores(
    q: Floats, q_at: int, head_dim: int, rows: Floats, k0: int, k1: int, k2: int, k3: int,
    spare: Floats,
) -> Any:  # fmt: skip
    """Return the partial sums of a query row's scores of four keys: eight sums for each key."""
    a = b = c = d = splat8(_f32(0))
    whole = head_dim - head_dim % 8
    for i in range(0, whole, 8):
        x = load8(q, q_at + i)
        a, b = fma(x, load8(rows, k0 + i), a), fma(x, load8(rows, k1 + i), b)
        c, d = fma(x, load8(rows, k2 + i), c), fma(x, load8(rows, k3 + i), d)
    if whole < head_dim:
        x, count = load8(q, q_at + whole), head_dim - whole
        a = fma(x, _load_tail(rows, k0 + whole, count, spare), a)
        b = fma(x, _load_tail(rows, k1 + whole, count, spare), b)
        c = fma(x, _load_tail(rows, k2 + whole, count, spare), c)
        d = fma(x, _load_tail(rows, k3 + whole, count, spare), d)
    return a, b, c, d


@inner()
def qk_row(
    q: Floats, q_at: int, head_dim: int, rows: Floats, row_at: int, begin: int, end: int,
    scores: Floats, at: int, spare: Floats, later: Any, ahead: int, prefetch_size: int,
) -> None:  # fmt: skip
    """Compute `scores[at + s]` of one query row for the positions s in [begin, end), not empty.

    The query row begins at `q[q_at]`, and the key of position s at `rows[row_at + s * head_dim]`.
    Unless `ahead` is -1, the function first prefetches the elements [ahead, ahead + prefetch_size)
    of `later`.
    """
    _prefetch(later, ahead, prefetch_size)
    k, whole = row_at + begin * head_dim, begin + (end - begin) // 4 * 4
    for s in range(begin, whole, 4):
        a, b, c, d = _partial_scores(
            q, q_at, head_dim, rows, k, k + head_dim, k + 2 * head_dim, k + 3 * head_dim, spare
        )
        store(scores, at + s, hsum4(a, b, c, d))
        k += 4 * head_dim
    if whole < end:
        # Positions past the end are replaced by the last one.
        s1, s2 = min(whole + 1, end - 1), min(whole + 2, end - 1)
        k1, k2 = row_at + s1 * head_dim, row_at + s2 * head_dim
        a, b, c, _ = _partial_scores(q, q_at, head_dim, rows, k, k1, k2, k2, spare)
        scores[at + whole], scores[at + s1], scores[at + s2] = hsum(a), hsum(b), hsum(c)


@inner(fastmath=FASTMATH)
def softmax_row(
    scores: Floats, at: int, low: int, seen: int, cap: float, slope: float, sink: float,
    spare: Floats,
) -> Any:  # fmt: skip
    """Replace one query row's scores of the positions [low, seen) by unnormalized softmax weights.

    The score of position s is `scores[at + s]`. The function first applies soft cap and slope to
    the scores. It returns the factor by which the weights must be multiplied to normalize them.
    """
    if cap > 0 or slope != 0:
        for s in range(low, seen):
            scores[at + s] = apply_score_mod(scores[at + s], cap, slope, s + 1 - seen)
    first, last = low // 8 * 8, (seen + 7) // 8 * 8
    scores[at + first : at + low] = -np.inf
    scores[at + seen : at + last] = -np.inf
    greatest = splat8(sink)
    for s in range(first, last, 8):
        greatest = vmax(load8(scores, at + s), greatest)
    store(spare, 0, greatest)
    most = spare[0]
    for i in range(8):
        most = max(most, spare[i])
    spare[:] = 0
    probs = scores[at + first : at + last]
    for s in range(len(probs)):
        probs[s] = exp(probs[s] - most)
    total = splat8(_f32(0))
    for chunk in range(first // SUM_POSITIONS * SUM_POSITIONS, last, SUM_POSITIONS):
        part = splat8(_f32(0))
        for s in range(max(chunk, first), min(chunk + SUM_POSITIONS, last), 8):
            part = vadd(part, load8(scores, at + s))
        total = vadd(total, part)
    return one_over(hsum(total), most, sink)


@inner()
def pv_row(
    probs: Floats, at: int, rows: Floats, row_at: int, begin: int, end: int, head_dim: int,
    sums: Floats, sums_at: int, later: Any, ahead: int, prefetch_size: int,
) -> None:  # fmt: skip
    """Add `probs[at + s]` times the value row of position s to `sums`, for s in [begin, end).

    `sums` of the query row begin at index `sums_at`. The value row of position s begins at
    `rows[row_at + s * head_dim]`. The function prefetches elements of `later`, as `qk_row` does.
    """
    _prefetch(later, ahead, prefetch_size)
    i = 0
    while i + 4 * VECTOR_WIDTH <= head_dim:
        to, v = sums_at + i, row_at + begin * head_dim + i
        a, b = load_wide(sums, to), load_wide(sums, to + VECTOR_WIDTH)
        c, d = load_wide(sums, to + 2 * VECTOR_WIDTH), load_wide(sums, to + 3 * VECTOR_WIDTH)
        for s in range(begin, end):
            x = broadcast_load(probs, at + s)
            a, b = fma(x, load_wide(rows, v), a), fma(x, load_wide(rows, v + VECTOR_WIDTH), b)
            c = fma(x, load_wide(rows, v + 2 * VECTOR_WIDTH), c)
            d = fma(x, load_wide(rows, v + 3 * VECTOR_WIDTH), d)
            v += head_dim
        store(sums, to, a)
        store(sums, to + VECTOR_WIDTH, b)
        store(sums, to + 2 * VECTOR_WIDTH, c)
        store(sums, to + 3 * VECTOR_WIDTH, d)
        i += 4 * VECTOR_WIDTH
    while i + VECTOR_WIDTH <= head_dim:
        a, v = load_wide(sums, sums_at + i), row_at + begin * head_dim + i
        for s in range(begin, end):
            a = fma(broadcast_load(probs, at + s), load_wide(rows, v), a)
            v += head_dim
        store(sums, sums_at + i, a)
        i += VECTOR_WIDTH
    for j in range(i, head_dim):
        one = sums[sums_at + j]
        for s in range(begin, end):
            one = fma(probs[at + s], rows[row_at + s * head_dim + j], one)
        sums[sums_at + j] = one


@inner()
def _chains(
    q: Floats, at: int, height: int, rows: Floats, k0: int, k1: int, k2: int, k3: int,
    first: int, head_dim: int,
) -> Any:  # fmt: skip
    """Return one of the eight partial sums of the scores of 2 * VECTOR_WIDTH query rows and 4 keys.

    The partial sum adds the products of the features `first`, `first` + 8, `first` + 16, ... The
    result is two vectors for each key; each vector has one lane per query row.
    """
    a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = splat_wide(_f32(0))
    for i in range(first, head_dim, 8):
        x, y = load_wide(q, at + i * height), load_wide(q, at + i * height + VECTOR_WIDTH)
        a, b = broadcast_load(rows, k0 + i), broadcast_load(rows, k1 + i)
        c, d = broadcast_load(rows, k2 + i), broadcast_load(rows, k3 + i)
        a0, a1, b0, b1 = fma(x, a, a0), fma(y, a, a1), fma(x, b, b0), fma(y, b, b1)
        c0, c1, d0, d1 = fma(x, c, c0), fma(y, c, c1), fma(x, d, d0), fma(y, d, d1)
    return a0, a1, b0, b1, c0, c1, d0, d1


@inner()
def qk_rows(
    q: Floats, height: int, head_dim: int, rows: Floats, row_at: int, begin: int, end: int,
    scores: Floats,
) -> None:  # fmt: skip
    """Compute the scores of all query rows for the positions [begin, end).

    `q` is [D, height] and `scores` [positions, height], with one column per query row. The key of
    position s begins at `rows[row_at + s * head_dim]`.
    """
    for s in range(begin, end, 4):
        s1, s2, s3 = min(s + 1, end - 1), min(s + 2, end - 1), min(s + 3, end - 1)
        k0, k1 = row_at + s * head_dim, row_at + s1 * head_dim
        k2, k3 = row_at + s2 * head_dim, row_at + s3 * head_dim
        for r in range(0, height, 2 * VECTOR_WIDTH):
            a0 = a1 = b0 = b1 = c0 = c1 = d0 = d1 = splat_wide(_f32(0))
            for j in range(4):
                x = _chains(q, r, height, rows, k0, k1, k2, k3, j, head_dim)
                y = _chains(q, r, height, rows, k0, k1, k2, k3, j + 4, head_dim)
                a0, a1 = vadd(a0, vadd(x[0], y[0])), vadd(a1, vadd(x[1], y[1]))
                b0, b1 = vadd(b0, vadd(x[2], y[2])), vadd(b1, vadd(x[3], y[3]))
                c0, c1 = vadd(c0, vadd(x[4], y[4])), vadd(c1, vadd(x[5], y[5]))
                d0, d1 = vadd(d0, vadd(x[6], y[6])), vadd(d1, vadd(x[7], y[7]))
            store(scores, s * height + r, a0)
            store(scores, s * height + r + VECTOR_WIDTH, a1)
            store(scores, s1 * height + r, b0)
            store(scores, s1 * height + r + VECTOR_WIDTH, b1)
            store(scores, s2 * height + r, c0)
            store(scores, s2 * height + r + VECTOR_WIDTH, c1)
            store(scores, s3 * height + r, d0)
            store(scores, s3 * height + r + VECTOR_WIDTH, d1)


@inner(fastmath=FASTMATH)
def _mask(
    scores: Floats, height: int, group: int, tile: tuple[int, int, int], bounds: tuple[int, int],
    cap: float, slopes: Floats,
) -> None:  # fmt: skip
    """Apply soft cap and slopes to the scores of all query rows, and mask scores with -inf.

    `bounds` is a range (first, last) of positions, `last` excluded. Each query row gets -inf as
    the score of every position within `bounds` that the row does not attend to. `tile` is the
    same as in `softmax_rows`.
    """
    count, context, behind = tile
    for r in range(count * group):
        seen = context + r // group
        low = max(seen - behind, 0)
        if cap > 0 or slopes[r % group] != 0:
            for s in range(low, seen):
                at = s * height + r
                scores[at] = apply_score_mod(scores[at], cap, slopes[r % group], s + 1 - seen)
        for s in range(bounds[0], low):
            scores[s * height + r] = -np.inf
        for s in range(seen, bounds[1]):
            scores[s * height + r] = -np.inf


@inner(fastmath=FASTMATH)
def softmax_rows(
    scores: Floats, height: int, group: int, tile: tuple[int, int, int], cap: float,
    slopes: Floats, sinks: Floats, most: Floats, totals: Floats, ones: Floats,
) -> None:  # fmt: skip
    """Do the work of `softmax_row` for all query rows; write the normalizing factors to `ones`.

    `tile` is (number of tokens, context length of the first token, window). `slopes` and `sinks`
    are [G], `ones` is [height]. `most` [height] and `totals` [16 height] are scratch buffers.
    """
    count, context, behind = tile
    first, last = max(context - behind, 0) // 8 * 8, (context + count + 6) // 8 * 8
    _mask(scores, height, group, tile, (first, last), cap, slopes)
    for r in range(height):
        most[r] = sinks[r % group]
    for s in range(first, last):
        row = scores[s * height : (s + 1) * height]
        for r in range(height):
            most[r] = row[r] if row[r] > most[r] else most[r]
    totals[:] = 0
    for chunk in range(first // SUM_POSITIONS * SUM_POSITIONS, last, SUM_POSITIONS):
        for s in range(max(chunk, first), min(chunk + SUM_POSITIONS, last)):
            row, total = scores[s * height : (s + 1) * height], totals[s % 8 * height :]
            for r in range(height):
                row[r] = exp(row[r] - most[r])
                total[r] += row[r]
        add_chunk(totals, 8 * height, 8 * height)
    for i in range(8 * height, 12 * height):
        totals[i] += totals[4 * height + i]
    for r in range(count * group):
        summed = totals[8 * height + r] + totals[9 * height + r]
        summed = (summed + totals[10 * height + r]) + totals[11 * height + r]
        ones[r] = one_over(summed, most[r], sinks[r % group])


@inner()
def pv_rows(
    probs: Floats, height: int, rows: Floats, row_at: int, begin: int, end: int, head_dim: int,
    sums: Floats,
) -> None:  # fmt: skip
    """Do the work of `pv_row` for all query rows: add the weighted values to `sums`.

    `probs` is [positions, height] and `sums` [D, height], with one column per query row.
    """
    for i in range(0, head_dim, 4):
        i1, i2, i3 = min(i + 1, head_dim - 1), min(i + 2, head_dim - 1), min(i + 3, head_dim - 1)
        for r in range(0, height, 2 * VECTOR_WIDTH):
            at, at1, at2, at3 = i * height + r, i1 * height + r, i2 * height + r, i3 * height + r
            a0, a1 = load_wide(sums, at), load_wide(sums, at + VECTOR_WIDTH)
            b0, b1 = load_wide(sums, at1), load_wide(sums, at1 + VECTOR_WIDTH)
            c0, c1 = load_wide(sums, at2), load_wide(sums, at2 + VECTOR_WIDTH)
            d0, d1 = load_wide(sums, at3), load_wide(sums, at3 + VECTOR_WIDTH)
            for s in range(begin, end):
                x = load_wide(probs, s * height + r)
                y = load_wide(probs, s * height + r + VECTOR_WIDTH)
                v = row_at + s * head_dim
                a, b = broadcast_load(rows, v + i), broadcast_load(rows, v + i1)
                c, d = broadcast_load(rows, v + i2), broadcast_load(rows, v + i3)
                a0, a1, b0, b1 = fma(x, a, a0), fma(y, a, a1), fma(x, b, b0), fma(y, b, b1)
                c0, c1, d0, d1 = fma(x, c, c0), fma(y, c, c1), fma(x, d, d0), fma(y, d, d1)
            store(sums, at, a0)
            store(sums, at + VECTOR_WIDTH, a1)
            store(sums, at1, b0)
            store(sums, at1 + VECTOR_WIDTH, b1)
            store(sums, at2, c0)
            store(sums, at2 + VECTOR_WIDTH, c1)
            store(sums, at3, d0)
            store(sums, at3 + VECTOR_WIDTH, d1)
