"""Triton kernels of log probabilities, and their launcher (see `logprobs`).

One pass computes the denominator of each row's softmax (`triton_vocab_scan`). Then the n most
likely tokens are found one after another among the few candidates of that pass. The rank of the
given token is found by counting larger logits, only in sub-blocks that contain any.
"""

import torch
from torch import Tensor

from penstock.kernels.sampling.logit_filters import FilterParams
from penstock.kernels.sampling.triton_vocab_scan import (
    SEGMENT,
    SUB,
    TILE,
    VocabMaxima,
    compact,
    load_candidates,
    scan,
)
from penstock.kernels.triton_common.launch import jit, launch, power_of_2, tl


@jit
def _rank_kernel(
    logits,  # [R, V] float32 with a row stride of logits_stride
    tokens,  # [R] int64
    sub_max,
    above,  # [R, segments] int32: number of logits larger than the given token's logit
    logits_stride,
    vocab_size,
    SUB: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Count the logits of a segment that exceed the given token's logit.

    The grid is [R, segments].
    """
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = row * tl.num_programs(1) + segment
    token = tl.load(tokens + row)
    known = (token >= 0) & (token < vocab_size)
    source = logits + row * logits_stride
    own = tl.load(source + token, mask=known, other=float("inf"))
    near = tl.load(sub_max + at * (SEGMENT // SUB) + tl.arange(0, SEGMENT // SUB)) > own
    logit = load_candidates(source, segment, vocab_size, near, SUB, SEGMENT)
    tl.store(above + at, tl.sum((logit > own).to(tl.int32), axis=0))


@jit(unspecialized=("num_best",))
def _top_k_kernel(
    logits,
    tokens,
    segment_max,
    segment_sum,
    above,
    near_values,  # `near_values`, `near_tokens` and `near_counts`: see `Candidates`
    near_tokens,
    near_counts,
    chosen,  # `chosen`, `ranks`, `best_tokens` and `best_values`: see `Logprobs`
    ranks,
    best_tokens,
    best_values,
    logits_stride,
    vocab_size,
    num_segments,
    num_best,
    SEGMENTS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute the fields of `Logprobs` for one row, with `num_best` tokens. The grid is [R]."""
    row, number = tl.program_id(0).to(tl.int64), tl.arange(0, SEGMENTS)
    own, has = row * num_segments + number, number < num_segments
    tops = tl.load(segment_max + own, mask=has, other=float("-inf"))
    top = tl.max(tops, axis=0)
    sums = tl.load(segment_sum + own, mask=has, other=0.0)
    total = tl.sum(tl.where(sums > 0, sums * tl.exp(tops - top), 0.0), axis=0)
    shift = top + tl.log(total)
    token = tl.load(tokens + row)
    known = (token >= 0) & (token < vocab_size)
    value = tl.load(logits + row * logits_stride + token, mask=known, other=float("-inf"))
    tl.store(chosen + row, value - shift)
    larger = tl.sum(tl.load(above + own, mask=has, other=0), axis=0)
    tl.store(ranks + row, larger.to(tl.int64) + 1)

    count = tl.load(near_counts + row)
    near_values += row * vocab_size
    last, last_at = float("inf"), -1
    for rank in range(num_best):
        # Find the next candidate in descending order of logits. Candidates with equal logits are
        # found in the order of tokens.
        best, best_at = float("-inf"), vocab_size
        for start in range(0, count, TILE):
            at = start + tl.arange(0, TILE)
            near = tl.load(near_values + at, mask=at < count, other=float("-inf"))
            later = (near < last) | ((near == last) & (at > last_at))
            near = tl.where(later, near, float("-inf"))
            largest, index = tl.max(near, axis=0, return_indices=True)
            best_at = tl.where(largest > best, start + index, best_at)
            best = tl.maximum(best, largest)
        name = tl.load(near_tokens + row * vocab_size + best_at, mask=best_at < count, other=0)
        tl.store(best_tokens + row * num_best + rank, name.to(tl.int64))
        tl.store(best_values + row * num_best + rank, best - shift)
        last, last_at = best, best_at


def logprobs_triton(
    logits: Tensor, tokens: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of `Logprobs`. The arguments are those of `logprobs`, with `count` < V."""
    num_rows = len(logits)
    ones, zeros = logits.new_ones(num_rows), logits.new_zeros(num_rows)
    maxima = scan(logits, ones, bans=True)
    filters = FilterParams(torch.full_like(tokens, count), ones, zeros)
    near = compact(maxima, filters, ones, with_tokens=count > 0)
    above = _larger_logits(maxima, tokens)
    fields = (
        torch.empty_like(ones),
        torch.empty_like(tokens),
        tokens.new_empty(num_rows, count),
        logits.new_empty(num_rows, count),
    )
    launch(
        _top_k_kernel,
        (num_rows,),
        logits,
        tokens,
        maxima.segment_max,
        maxima.segment_sum,
        above,
        near.values,
        near.tokens,
        near.counts,
        *fields,
        logits.stride(0),
        logits.shape[1],
        maxima.num_segments,
        count,
        SEGMENTS=power_of_2(maxima.num_segments),
        TILE=TILE,
    )
    return fields


def _larger_logits(maxima: VocabMaxima, tokens: Tensor) -> Tensor:
    """Count the logits of each segment that exceed the logit of the row's given token.

    The result is [R, segments] int32.
    """
    logits, above = maxima.logits, torch.empty_like(maxima.broken)
    launch(
        _rank_kernel,
        tuple(above.shape),
        logits,
        tokens,
        maxima.sub_max,
        above,
        logits.stride(0),
        logits.shape[1],
        SUB=SUB,
        SEGMENT=SEGMENT,
    )
    return above
