"""Triton kernels that sample a token per row, and their launcher (see `sampling/op`).

`_threshold_kernel` finds the exact filter thresholds among the few tokens that `triton_vocab_scan`
collects. `_sample_kernel` adds noise, bitwise identical to `philox`, only in segments with tokens
that pass the filters. `_pick_kernel` chooses the best token of all segments.
"""

import torch
from torch import Tensor

from penstock.kernels.sampling.logit_filters import FilterParams
from penstock.kernels.sampling.philox import SAMPLE
from penstock.kernels.sampling.triton_vocab_scan import (
    ROW_VECTORS,
    SEGMENT,
    SUB,
    TILE,
    Candidates,
    VocabMaxima,
    compact,
    key_of,
    kth_largest_key,
    load_candidates,
    min_p_floor,
    scan,
    value_of,
)
from penstock.kernels.triton_common.launch import jit, launch, power_of_2, tl


@jit
def _mass_from(values, count, top, floor, TILE: tl.constexpr):
    """Return the sum of exp(value - top) over the values that are at least `floor`."""
    held = tl.zeros((TILE,), tl.float32)
    for start in range(0, count, TILE):
        at = start + tl.arange(0, TILE)
        value = tl.load(values + at, mask=at < count, other=float("-inf"))
        held += tl.where(value >= floor, tl.exp(value - top), 0.0)
    return tl.sum(held, axis=0)


@jit(unspecialized=(*ROW_VECTORS, "floors", "centres", "widths"))
def _threshold_kernel(
    temperature,
    top_k,
    top_p,
    min_p,
    typical_p,
    values,
    counts,
    tops,
    totals,
    bounds,
    floors,  # [R] float32: logits / temperature below this value are excluded
    centres,  # [R] float32: middle of the range of logits / temperature that typical_p keeps
    widths,  # [R] float32: half of the width of the range that typical_p keeps
    vocab_size,
    TILE: tl.constexpr,
):
    """Find a row's thresholds from the results of `_compact_kernel`. The grid is [R]."""
    row = tl.program_id(0).to(tl.int64)
    top, count = tl.load(tops + row), tl.load(counts + row)
    if tl.load(temperature + row) <= 0:
        tl.store(floors + row, top)
        tl.store(centres + row, 0.0)
        tl.store(widths + row, float("inf"))
        return
    values += row * vocab_size
    fraction, limit = tl.load(top_p + row), tl.load(top_k + row)
    low, high = key_of(tl.load(bounds + row)), key_of(top)
    if count > 0:
        # Without top-k, the candidates are only the tokens that top-p may keep. Therefore
        # `total` also includes the other tokens.
        total = tl.load(totals + row)
        if (limit > 0) & (limit < vocab_size):
            target = limit.to(tl.float32)
            low = kth_largest_key(values, count, low, high, target, top, top, top, "rank", TILE)
            total = _mass_from(values, count, top, value_of(low), TILE)
        if fraction < 1:
            target = fraction * total
            low = kth_largest_key(values, count, low, high, target, top, top, top, "mass", TILE)
    floor = tl.maximum(value_of(low), min_p_floor(tl.load(min_p + row), top))
    tl.store(floors + row, floor)

    fraction = tl.load(typical_p + row)
    if (fraction < 1) & (count > 0):
        held = _mass_from(values, count, top, floor, TILE)
        lean = tl.zeros((TILE,), tl.float32)
        for start in range(0, count, TILE):
            at = start + tl.arange(0, TILE)
            value = tl.load(values + at, mask=at < count, other=float("-inf"))
            value = tl.where(value >= floor, tl.maximum(value - top, -80.0), 0.0)
            lean += value * tl.exp(value)
        # `centre` is the mean logit, weighted by probability. The surprisal of a token with this
        # logit would equal the entropy of the distribution.
        centre = top + tl.sum(lean, axis=0) / held
        near, far = tl.full((), 0, tl.int64), tl.full((), 0x7F800000, tl.int64)
        target = (1 - fraction) * held
        near = kth_largest_key(values, count, near, far, target, top, floor, centre, "oddity", TILE)
        tl.store(centres + row, centre)
        tl.store(widths + row, value_of(near))
    else:
        tl.store(centres + row, 0.0)
        tl.store(widths + row, float("inf"))


@jit(
    unspecialized=("temperature", "seeds", "indices", "choices", "floors", "centres", "widths"),
)
def _sample_kernel(
    logits,  # [R, V] float32 with a row stride of logits_stride
    temperature,
    seeds,
    indices,
    choices,
    sub_max,
    floors,
    centres,
    widths,
    # [R, segments] float32: largest logit + noise of tokens that pass the filters; -inf if none do
    best,
    best_tokens,  # [R, segments] int32: the token with the value in `best`
    logits_stride,
    vocab_size,
    PURPOSE: tl.constexpr,
    SUB: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Find the token of one segment with the largest logit + noise. The grid is [R, segments]."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * tl.num_programs(1) + segment
    subs = sub_max + at * (SEGMENT // SUB)
    floor = tl.load(floors + row)
    near = tl.load(subs + tl.arange(0, SEGMENT // SUB))
    if tl.max(near, axis=0) < floor:
        tl.store(best + at, float("-inf"))
        tl.store(best_tokens + at, 0)
        return
    source = logits + row * logits_stride
    logit = load_candidates(source, segment, vocab_size, near >= floor, SUB, SEGMENT)
    heat = tl.load(temperature + row)
    score = tl.math.div_rn(logit, tl.where(heat > 0, heat, 1.0))
    far = tl.abs(score - tl.load(centres + row)) > tl.load(widths + row)
    keep = (score >= floor) & (score > float("-inf")) & ~far
    if heat > 0:
        lane = segment * (SEGMENT // 4) + tl.arange(0, SEGMENT // 4)
        index = tl.load(indices + row).to(tl.int32) + lane * 0
        choice = tl.load(choices + row).to(tl.int32) + lane * 0
        w0, w1, w2, w3 = tl.philox(tl.load(seeds + row), lane, index, choice, lane * 0 + PURPOSE)
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        score += gumbel(words)
    score = tl.where(keep, score, float("-inf"))
    value, best_index = tl.max(score, axis=0, return_indices=True)
    tl.store(best + at, value)
    tl.store(best_tokens + at, segment * SEGMENT + best_index)


@jit
def gumbel(words):
    """Convert random words to Gumbel noise by the same operations as `philox.gumbel_`."""
    uniform = tl.minimum((words.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    rest = 1.0 - uniform
    lost = 1.0 - rest
    scale = tl.math.div_rn(uniform, tl.where(lost > 0, lost, 1.0))
    surprise = tl.where(lost > 0, -_log(rest) * scale, uniform)
    return -_log(surprise)


@jit
def _log(x):
    """Return the natural logarithm, by the same operations as `philox._log_`."""
    bits = x.to(tl.int32, bitcast=True) + 0x4AFB0D
    exponent = ((bits >> 23) - 127).to(tl.float32)
    mantissa = ((bits & 0x7FFFFF) + 0x3F3504F3).to(tl.float32, bitcast=True)
    s = tl.math.div_rn(mantissa - 1.0, mantissa + 1.0)
    z = s * s
    series = ((z * 0.2857142857 + 0.4) * z + 0.6666666667) * z + 2.0
    return series * s + exponent * 0.6931471806


@jit
def _pick_kernel(
    best,
    best_tokens,
    broken,
    tokens,  # [R] int64 result: the sampled token
    finite,  # [R] bool result: whether the row is valid
    num_segments,
    SEGMENTS: tl.constexpr,
):
    """Choose a row's token among the best tokens of its segments. The grid is [R]."""
    row, number = tl.program_id(0), tl.arange(0, SEGMENTS)
    own, has = row * num_segments + number, number < num_segments
    value, which = tl.max(
        tl.load(best + own, mask=has, other=float("-inf")), axis=0, return_indices=True
    )
    wrong = tl.max(tl.load(broken + own, mask=has, other=0), axis=0) > 0
    good = (value > float("-inf")) & ~wrong
    token = tl.load(best_tokens + row * num_segments + which)
    tl.store(tokens + row, tl.where(good, token, 0).to(tl.int64))
    tl.store(finite + row, good)


def sample_triton(
    logits: Tensor,
    temperature: Tensor,
    filters: FilterParams,
    typical_p: Tensor,
    seeds: Tensor,
    indices: Tensor,
    choices: Tensor,
    bans: bool,
) -> tuple[Tensor, Tensor]:
    """Return the tokens and the mask of valid rows; the arguments are those of `sample`."""
    num_rows, vocab_size = logits.shape
    maxima = scan(logits, temperature, bans)
    near = compact(maxima, filters, typical_p, with_tokens=False)
    limits = thresholds(maxima, near, filters, typical_p)
    shape = (num_rows, maxima.num_segments)
    best, best_tokens = logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)
    launch(
        _sample_kernel,
        shape,
        logits,
        temperature,
        seeds,
        indices,
        choices,
        maxima.sub_max,
        *limits,
        best,
        best_tokens,
        logits.stride(0),
        vocab_size,
        PURPOSE=SAMPLE,
        SUB=SUB,
        SEGMENT=SEGMENT,
        # Fusing is disabled. Fused multiply-adds round only once, so the noise would differ from
        # the noise on a CPU.
        enable_fp_fusion=False,
        num_warps=8,
    )
    tokens = logits.new_empty(num_rows, dtype=torch.int64)
    finite = logits.new_empty(num_rows, dtype=torch.bool)
    launch(
        _pick_kernel,
        (num_rows,),
        best,
        best_tokens,
        maxima.broken,
        tokens,
        finite,
        maxima.num_segments,
        SEGMENTS=power_of_2(maxima.num_segments),
        num_warps=1,
    )
    return tokens, finite


def thresholds(
    maxima: VocabMaxima, near: Candidates, filters: FilterParams, typical_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the floors, centres and widths of `_threshold_kernel`, [R] each."""
    num_rows, vocab_size = maxima.logits.shape
    floors, centres, widths = maxima.logits.new_empty(3, num_rows)
    launch(
        _threshold_kernel,
        (num_rows,),
        maxima.temperature,
        filters.top_k,
        filters.top_p,
        filters.min_p,
        typical_p,
        near.values,
        near.counts,
        near.tops,
        near.totals,
        near.bounds,
        floors,
        centres,
        widths,
        vocab_size,
        TILE=TILE,
    )
    return floors, centres, widths
