"""Triton kernels that find the few tokens that sampling filters may keep.

One pass (`_scan_kernel`) reads the whole vocabulary. Most tokens are far too unlikely to pass any
filter. Therefore the pass stores the maximum of every sub-block of 64 tokens. These maxima give a
lower bound of a filter's threshold: the k-th largest maximum is at most the k-th largest logit, and
there is a similar bound for sums of probabilities. Then `_compact_kernel` collects only the tokens
at or above the bound, and reads only sub-blocks whose maximum is at or above the bound. For a flat
distribution, nearly all tokens are collected; this is slower, but the result is still exact.

The order of a row's sums does not depend on other rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.sampling.logit_filters import FilterParams
from penstock.kernels.triton_common.launch import jit, launch, power_of_2, tl

SUB = 64  # number of tokens per sub-block
SEGMENT = 4096  # number of tokens per segment; a program scans one segment
TILE = 512  # number of values per iteration of a search loop

ROW_VECTORS = ("temperature", "top_k", "top_p", "min_p", "typical_p")
"""Names of parameters with one value per row. The parameters are slices of one tensor, so the
alignment of their addresses depends on R. A kernel must not be specialized for an alignment."""


@jit
def key_of(value):
    """Map floats to integers of the same order, from -2139095041 (-inf) to 0x7F800000 (inf)."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@jit
def value_of(key):
    """Return the float32 that `key_of` maps to `key`."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@jit
def kth_largest_key(
    values,  # [count] float32
    count,
    low,  # smallest key that may be returned
    high,  # largest key; returned if no smaller key qualifies
    target,
    top,  # at least the largest value; used for the weights exp(value - top)
    floor,  # only for "oddity": values below `floor` have weight 0
    centre,  # only for "oddity": the key of a value is `key_of(|value - centre|)`
    # With "rank", each value has weight 1; with "mass" and "oddity", exp(value - top).
    BY: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the smallest key such that values with larger keys have a total weight < `target`.

    The key of a value is `key_of(value)`. With "oddity" (for typical_p), it is the key of the
    distance from `centre`, and the condition is a total weight <= `target`. Each iteration divides
    the range of possible keys by 16.
    """
    way = tl.arange(0, 16)
    while low < high:
        step = (high - low + 15) // 16
        keys = (low + step * way).to(tl.int32)
        above = tl.zeros((16,), tl.float32)
        for start in range(0, count, TILE):
            at = start + tl.arange(0, TILE)
            value = tl.load(values + at, mask=at < count, other=float("-inf"))
            weight = tl.full((TILE,), 1.0, tl.float32)
            if BY != "rank":
                weight = tl.exp(value - top)
            if BY == "oddity":
                weight = tl.where(value >= floor, weight, 0.0)
                value = tl.abs(value - centre)
            bits = value.to(tl.int32, bitcast=True)
            bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
            more = bits[:, None] > keys[None, :]
            above += tl.sum(tl.where(more, weight[:, None], 0.0), axis=0)
        too_much = above > target if BY == "oddity" else above >= target
        passed = tl.sum(too_much.to(tl.int32), axis=0)
        high = tl.where(passed < 16, tl.minimum(high, low + step * passed), high)
        low = tl.where(passed > 0, low + step * (passed - 1) + 1, low)
    return low


@jit(unspecialized=("temperature",))
def _scan_kernel(
    logits,  # [R, V] float32 with a row stride of logits_stride
    temperature,  # [R] float32; 0 (greedy) is treated as 1
    sub_max,  # [R, subs] float32: largest logit / temperature of each sub-block
    segment_max,  # [R, segments] float32: largest logit / temperature of each segment
    segment_sum,  # [R, segments] float32: sum of exp(logit / temperature - segment_max)
    broken,  # [R, segments] int32: 1 if a logit is NaN or Inf
    logits_stride,
    vocab_size,
    BANS: tl.constexpr,  # True if -inf marks a banned token, which does not set `broken`
    SUB: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Compute the maxima and the sum of exponentials of one segment. The grid is [R, segments]."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_segments = tl.num_programs(1)
    sub = tl.arange(0, SEGMENT // SUB)
    token = segment * SEGMENT + sub[:, None] * SUB + tl.arange(0, SUB)[None, :]
    inside = token < vocab_size
    logit = tl.load(logits + row * logits_stride + token, mask=inside, other=float("-inf"))
    wrong = inside & ~(logit < float("inf"))
    if not BANS:
        wrong = wrong | (inside & (logit == float("-inf")))
    heat = tl.load(temperature + row)
    logit = tl.math.div_rn(logit, tl.where(heat > 0, heat, 1.0))
    largest = tl.max(logit, axis=1)
    top = tl.max(largest, axis=0)
    mass = tl.where(logit == float("-inf"), 0.0, tl.exp(logit - top))
    at = row * num_segments + segment
    tl.store(sub_max + at * (SEGMENT // SUB) + sub, largest)
    tl.store(segment_max + at, top)
    tl.store(segment_sum + at, tl.sum(tl.sum(mass, axis=1), axis=0))
    tl.store(broken + at, tl.max(tl.max(wrong.to(tl.int32), axis=1), axis=0))


@jit
def load_candidates(row, segment, vocab_size, near, SUB: tl.constexpr, SEGMENT: tl.constexpr):
    """Load the logits [SEGMENT] of a segment of a row.

    Only sub-blocks for which `near` is True are read. The other logits are -inf.
    """
    sub = tl.arange(0, SEGMENT // SUB)
    token = segment * SEGMENT + sub[:, None] * SUB + tl.arange(0, SUB)[None, :]
    logit = tl.load(row + token, mask=near[:, None] & (token < vocab_size), other=float("-inf"))
    return tl.reshape(logit, (SEGMENT,))


@jit
def min_p_floor(min_p, top):
    """Return the smallest logit / temperature that `min_p` keeps; -inf if `min_p` is 0."""
    return tl.where(min_p > 0, top + tl.log(tl.maximum(min_p, 1e-37)), float("-inf"))


@jit(unspecialized=ROW_VECTORS)
def _compact_kernel(
    logits,
    temperature,
    top_k,  # [R] int64; 0 keeps all tokens
    top_p,  # [R] float32; 1 keeps all tokens
    min_p,  # [R] float32; 0 keeps all tokens
    typical_p,  # [R] float32; 1 keeps all tokens
    sub_max,
    segment_max,
    segment_sum,
    values,  # [R, V] float32: candidates' logits / temperature, in token order
    tokens,  # [R, V] int32: candidates' token ids; not written without TOKENS
    counts,  # [R] int32: number of candidates; 0 if no filter but min_p applies
    tops,  # [R] float32: the largest logit / temperature
    # [R] float32: sum of exp(logit / temperature - top) over all tokens; 0 if `counts` is 0
    totals,
    bounds,  # [R] float32: no filter keeps a token whose logit / temperature is lower
    logits_stride,
    vocab_size,
    num_segments,
    TOKENS: tl.constexpr,
    SUB: tl.constexpr,
    SEGMENT: tl.constexpr,
    SEGMENTS: tl.constexpr,  # num_segments, rounded up to a power of two
    TILE: tl.constexpr,
):
    """Collect the tokens of a row that the filters may keep. The grid is [R]."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, SEGMENTS)
    own = row * num_segments + number
    segment_top = tl.load(segment_max + own, mask=number < num_segments, other=float("-inf"))
    top = tl.max(segment_top, axis=0)
    tl.store(tops + row, top)
    tl.store(counts + row, 0)
    tl.store(totals + row, 0.0)
    tl.store(bounds + row, float("-inf"))
    heat, limit = tl.load(temperature + row), tl.load(top_k + row)
    fraction = tl.load(top_p + row)
    by_rank, by_mass = (limit > 0) & (limit < vocab_size), fraction < 1
    wanted = by_rank | by_mass | (tl.load(typical_p + row) < 1)
    if (heat <= 0) | (not wanted) | ~(top > float("-inf")):
        return

    sums = tl.load(segment_sum + own, mask=number < num_segments, other=0.0)
    total = tl.sum(tl.where(sums > 0, sums * tl.exp(segment_top - top), 0.0), axis=0)
    tl.store(totals + row, total)
    num_subs = num_segments * (SEGMENT // SUB)
    subs = sub_max + row * num_subs
    low, high = tl.full((), -2139095041, tl.int64), key_of(top)
    if by_rank:
        low = kth_largest_key(
            subs, num_subs, low, high, limit.to(tl.float32), top, top, top, "rank", TILE
        )
    elif by_mass:
        low = kth_largest_key(
            subs, num_subs, low, high, fraction * total, top, top, top, "mass", TILE
        )
    else:
        low = key_of(min_p_floor(tl.load(min_p + row), top))
    bound = value_of(low)
    tl.store(bounds + row, bound)

    count = 0
    for segment in range(num_segments):
        start = segment * (SEGMENT // SUB)
        maxima = tl.load(subs + start + tl.arange(0, SEGMENT // SUB))
        if tl.max(maxima, axis=0) >= bound:
            source = logits + row * logits_stride
            logit = load_candidates(source, segment, vocab_size, maxima >= bound, SUB, SEGMENT)
            logit = tl.math.div_rn(logit, heat)
            token = segment * SEGMENT + tl.arange(0, SEGMENT)
            keep = (logit >= bound) & (logit > float("-inf"))
            target = count + tl.cumsum(keep.to(tl.int32), axis=0) - 1
            tl.store(values + row * vocab_size + target, logit, mask=keep)
            if TOKENS:
                tl.store(tokens + row * vocab_size + target, token, mask=keep)
            count += tl.sum(keep.to(tl.int32), axis=0)
    tl.store(counts + row, count)


@dataclass(frozen=True, slots=True)
class VocabMaxima:
    """Results of `scan` for R rows. `_scan_kernel` describes the fields."""

    logits: Tensor  # [R, V] float32
    temperature: Tensor  # [R] float32
    sub_max: Tensor  # [R, segments, SEGMENT / SUB] float32
    segment_max: Tensor  # [R, segments] float32
    segment_sum: Tensor  # [R, segments] float32
    broken: Tensor  # [R, segments] int32

    @property
    def num_segments(self) -> int:
        return self.broken.shape[1]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The tokens of R rows that the filters may keep, in token order."""

    values: Tensor  # [R, V] float32: logits / temperature
    tokens: Tensor  # [R, V] int32: token ids; [R, 0] if they were not requested
    counts: Tensor  # [R] int32: number of candidates; 0 if no filter needs candidates
    tops: Tensor  # [R] float32: the largest logit / temperature
    # [R] float32: sum of exp(logit / temperature - top) over all tokens; 0 if `counts` is 0
    totals: Tensor
    bounds: Tensor  # [R] float32: lowest value of logit / temperature that filters may keep


def scan(logits: Tensor, temperature: Tensor, bans: bool) -> VocabMaxima:
    """Return the `VocabMaxima` of R rows.

    Args:
        logits: [R, V] float32.
        temperature: [R] float32; 0 is treated as 1.
        bans: True if -inf marks a banned token. If False, a row that contains -inf is invalid.
    """
    num_rows, vocab_size = logits.shape
    num_segments = -(-vocab_size // SEGMENT)
    found = VocabMaxima(
        logits,
        temperature,
        logits.new_empty(num_rows, num_segments, SEGMENT // SUB),
        logits.new_empty(num_rows, num_segments),
        logits.new_empty(num_rows, num_segments),
        logits.new_empty(num_rows, num_segments, dtype=torch.int32),
    )
    launch(
        _scan_kernel,
        (num_rows, num_segments),
        logits,
        temperature,
        found.sub_max,
        found.segment_max,
        found.segment_sum,
        found.broken,
        logits.stride(0),
        vocab_size,
        BANS=bans,
        SUB=SUB,
        SEGMENT=SEGMENT,
        num_warps=8,
    )
    return found


def compact(
    maxima: VocabMaxima, filters: FilterParams, typical_p: Tensor, with_tokens: bool
) -> Candidates:
    """Collect the tokens of each row that `filters` and the filter `typical_p` [R] may keep."""
    logits, (num_rows, vocab_size) = maxima.logits, maxima.logits.shape
    near = Candidates(
        logits.new_empty(num_rows, vocab_size),
        logits.new_empty((num_rows, vocab_size if with_tokens else 0), dtype=torch.int32),
        logits.new_empty(num_rows, dtype=torch.int32),
        logits.new_empty(num_rows),
        logits.new_empty(num_rows),
        logits.new_empty(num_rows),
    )
    launch(
        _compact_kernel,
        (num_rows,),
        logits,
        maxima.temperature,
        filters.top_k,
        filters.top_p,
        filters.min_p,
        typical_p,
        maxima.sub_max,
        maxima.segment_max,
        maxima.segment_sum,
        near.values,
        near.tokens,
        near.counts,
        near.tops,
        near.totals,
        near.bounds,
        logits.stride(0),
        vocab_size,
        maxima.num_segments,
        TOKENS=with_tokens,
        SUB=SUB,
        SEGMENT=SEGMENT,
        SEGMENTS=power_of_2(maxima.num_segments),
        TILE=TILE,
        num_warps=8,
    )
    return near
