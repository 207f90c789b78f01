"""Log probabilities of one given token and of the most likely tokens per row.

On a GPU, one pass computes the denominator of each row's softmax (`vocab_scan`). Then the n most
likely tokens are found one after another among the few candidates of that pass. The rank of the
given token is found by counting larger logits, only in sub-blocks that contain any.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.fallback import record_fallback
from penstock.kernels.sampling.logit_filters import FilterParams
from penstock.kernels.sampling.vocab_scan import (
    SEGMENT,
    SUB,
    TILE,
    VocabMaxima,
    compact,
    load_candidates,
    scan,
)
from penstock.kernels.triton_common.aot import AotCase, meta
from penstock.kernels.triton_common.launch import check, jit, launch, power_of_2, tl, use_triton


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities (natural logarithm) of R rows."""

    chosen: Tensor  # [R] float32: log probability of the given token
    ranks: Tensor  # [R] int64: 1 + the number of tokens that are more likely than the given token
    tokens: Tensor  # [R, n] int64: the most likely tokens, most likely first
    values: Tensor  # [R, n] float32: log probabilities of `tokens`


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> Logprobs:
    """Return the log probabilities of the given tokens and of the `count` most likely tokens.

    logits: [R, V] float32; tokens: [R] int64, one per row. Raise ValueError if `count` < 0.
    """
    if count < 0:
        raise ValueError(f"count: at least 0 expected, not {count}")
    count = min(count, logits.shape[-1])
    if use_triton(logits):
        if count < logits.shape[-1]:
            return _logprobs_on_device(logits, tokens, count)
        record_fallback("logprobs", logits.device, "the whole vocabulary")
    found = logits.log_softmax(-1)
    chosen = found.gather(1, tokens[:, None])[:, 0]
    best = found.topk(count)
    return Logprobs(chosen, (found > chosen[:, None]).sum(-1) + 1, best.indices, best.values)


def logprobs_reference(logits: Tensor, tokens: Tensor, count: int) -> Logprobs:
    """Reference implementation of `logprobs`, one row at a time, in float64."""
    found = logits.double().log_softmax(-1)
    chosen = torch.stack([row[token] for row, token in zip(found, tokens, strict=True)])
    ranks = [
        sum(row > value) + 1
        for row, value in zip(logits, logits.gather(1, tokens[:, None]), strict=True)
    ]
    order = found.sort(dim=-1, descending=True, stable=True)
    best = order.indices[:, :count]
    return Logprobs(chosen, torch.stack(ranks), best, order.values[:, :count])


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
    """Count the logits of a segment that exceed the given token's logit. Grid: (R, segments)."""
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
    """Compute the fields of `Logprobs` for one row, with `num_best` tokens. One program per row."""
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
        # Find the next candidate in descending order of logits; equal logits in token order.
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


def _logprobs_on_device(logits: Tensor, tokens: Tensor, count: int) -> Logprobs:
    check("logits", logits, ("R", "V"), (torch.float32,))
    num_rows, vocab_size = logits.shape
    check("tokens", tokens, (num_rows,), (torch.int64,), like=logits)
    ones, zeros = logits.new_ones(num_rows), logits.new_zeros(num_rows)
    found = scan(logits, ones, bans=True)
    cuts = FilterParams(torch.full_like(tokens, count), ones, zeros)
    near = compact(found, cuts, ones, with_tokens=count > 0)
    above = _ranks(found, tokens)
    made = Logprobs(
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
        found.segment_max,
        found.segment_sum,
        above,
        near.values,
        near.tokens,
        near.counts,
        made.chosen,
        made.ranks,
        made.tokens,
        made.values,
        logits.stride(0),
        vocab_size,
        found.num_segments,
        count,
        SEGMENTS=power_of_2(found.num_segments),
        TILE=TILE,
    )
    return made


def _ranks(found: VocabMaxima, tokens: Tensor) -> Tensor:
    """Count the logits of each segment that exceed the given token's: [R, segments] int32."""
    logits, above = found.logits, torch.empty_like(found.broken)
    launch(
        _rank_kernel,
        tuple(above.shape),
        logits,
        tokens,
        found.sub_max,
        above,
        logits.stride(0),
        logits.shape[1],
        SUB=SUB,
        SEGMENT=SEGMENT,
    )
    return above


def aot_cases() -> Iterator[AotCase]:
    logits = meta(16, 128256, dtype=torch.float32)
    tokens = meta(16, dtype=torch.int64)
    yield AotCase("the 20 likeliest of 128256", lambda: logprobs(logits, tokens, 20))
