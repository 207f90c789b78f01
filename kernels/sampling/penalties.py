"""Repetition, presence and frequency penalties, and logit biases, applied in place.

On a GPU, the first kernel counts each token's occurrences in a table [P, V] with integer atomics;
the order of integer additions does not matter. The second kernel reads and clears the counts
atomically: only the first position of a token to read the count finds it non-zero and changes the
logit, so each logit is changed exactly once.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.triton_common.aot import AotCase, meta
from penstock.kernels.triton_common.launch import check, jit, launch, tl, use_triton


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of P rows: each field is [P] float32. The values 1, 0 and 0 have no effect."""

    repetition: Tensor
    presence: Tensor
    frequency: Tensor


def apply_penalties_(
    logits: Tensor, tokens: Tensor, num_prompt: Tensor, num_tokens: Tensor, penalties: Penalties
) -> None:
    """Penalise tokens that occur in the prompt or the answer, in place.

    For each token of the prompt or the answer, a positive logit is divided by `repetition`, and a
    negative logit is multiplied by `repetition` (Keskar et al., 2019). Then, from the logit of each
    token of the answer, `frequency` is subtracted per occurrence, and `presence` once.

    Args:
        logits: [P, V] float32.
        tokens: [P, L] int64: prompt, answer, then padding of any value.
        num_prompt: [P] int64: length of the prompt.
        num_tokens: [P] int64: length of prompt and answer, from 1 to L.
        penalties: penalties of the P rows.

    On a GPU, token ids outside the vocabulary and positions from L on are ignored.
    """
    if use_triton(logits):
        _penalize_on_device(logits, tokens, num_prompt, num_tokens, penalties)
        return
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    valid = positions < num_tokens[:, None]
    answered = valid & (positions >= num_prompt[:, None])
    # Replace padding by the row's first token: duplicate tokens all write the same value.
    seen = torch.where(valid, tokens, tokens[:, :1])
    scores = logits.gather(1, seen)
    factor = penalties.repetition[:, None]
    logits.scatter_(1, seen, torch.where(scores > 0, scores / factor, scores * factor))
    logits.scatter_add_(1, seen, answered * -penalties.frequency[:, None])
    first = num_prompt.minimum(num_tokens - 1)[:, None]
    present = torch.where(answered, tokens, tokens.gather(1, first))
    has_answer = (num_tokens > num_prompt)[:, None]
    logits.scatter_(
        1, present, logits.gather(1, present) - has_answer * penalties.presence[:, None]
    )


def apply_penalties_reference(
    logits: Tensor, tokens: Tensor, num_prompt: Tensor, num_tokens: Tensor, penalties: Penalties
) -> Tensor:
    """Reference implementation of `apply_penalties_`, one token at a time; return a new tensor."""
    out = logits.clone()
    for row, (start, stop) in enumerate(zip(num_prompt.tolist(), num_tokens.tolist(), strict=True)):
        answer = tokens[row, start:stop].tolist()
        factor = penalties.repetition[row]
        for token in set(tokens[row, :stop].tolist()):
            score = out[row, token]
            out[row, token] = score / factor if score > 0 else score * factor
        for token in set(answer):
            out[row, token] -= penalties.frequency[row] * answer.count(token)
            out[row, token] -= penalties.presence[row]
    return out


@jit(unspecialized=("max_len", "tokens_stride"))
def _count_occurrences(
    tokens,  # [P, L] int64 with a row stride of tokens_stride
    num_prompt,
    num_tokens,
    occurrences,  # [P, V] int32 zeros: sets bit 0 for prompt tokens, adds 2 per time in the answer
    max_len,  # L
    tokens_stride,
    vocab_size,
    TILE: tl.constexpr,
):
    """Count the occurrences of each token of a row. Grid: (P, tiles of L)."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    count = tl.minimum(tl.load(num_tokens + row), max_len)
    if tl.program_id(1) * TILE >= count:
        return
    inside = at < count
    token = tl.load(tokens + row * tokens_stride + at, mask=inside, other=-1)
    inside = inside & (token >= 0) & (token < vocab_size)
    answered = at >= tl.load(num_prompt + row)
    one = tl.full((TILE,), 1, tl.int32)
    tl.atomic_or(occurrences + row * vocab_size + token, one, mask=inside & ~answered)
    tl.atomic_add(occurrences + row * vocab_size + token, 2 * one, mask=inside & answered)


@jit(unspecialized=("max_len", "tokens_stride"))
def _penalty_kernel(
    logits,  # [P, V] float32 with a row stride of logits_stride
    tokens,
    num_tokens,
    occurrences,  # [P, V] int32 from `_count_occurrences`; reset to zeros
    repetition,  # [P] float32
    presence,  # [P] float32
    frequency,  # [P] float32
    max_len,  # L
    logits_stride,
    tokens_stride,
    vocab_size,
    TILE: tl.constexpr,
):
    """Penalise each distinct token of a row once. Grid: (P, tiles of L)."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
    count = tl.minimum(tl.load(num_tokens + row), max_len)
    if tl.program_id(1) * TILE >= count:
        return
    inside = at < count
    token = tl.load(tokens + row * tokens_stride + at, mask=inside, other=-1)
    inside = inside & (token >= 0) & (token < vocab_size)
    none = tl.full((TILE,), 0, tl.int32)
    found = tl.atomic_and(occurrences + row * vocab_size + token, none, mask=inside)
    first = inside & (found != 0)
    score = tl.load(logits + row * logits_stride + token, mask=first, other=0.0)
    factor = tl.load(repetition + row)
    score = tl.where(
        score > 0, tl.math.div_rn(score, factor + tl.zeros_like(score)), score * factor
    )
    times = (found >> 1).to(tl.float32)
    score -= times * tl.load(frequency + row)
    score -= tl.where(times > 0, tl.load(presence + row), 0.0)
    tl.store(logits + row * logits_stride + token, score, mask=first)


TILE = 1024  # token positions (or biases, in `_bias_kernel`) per program


def _penalize_on_device(
    logits: Tensor, tokens: Tensor, num_prompt: Tensor, num_tokens: Tensor, penalties: Penalties
) -> None:
    check("logits", logits, ("P", "V"), (torch.float32,))
    num_rows, vocab_size = logits.shape
    check("tokens", tokens, (num_rows, "L"), (torch.int64,), like=logits)
    for name, each in (("num_prompt", num_prompt), ("num_tokens", num_tokens)):
        check(name, each, (num_rows,), (torch.int64,), like=logits)
    for name in ("repetition", "presence", "frequency"):
        check(name, getattr(penalties, name), (num_rows,), (torch.float32,), like=logits)
    occurrences = logits.new_zeros((num_rows, vocab_size), dtype=torch.int32)
    max_len, stride = tokens.shape[1], tokens.stride(0)
    grid = (num_rows, -(-max_len // TILE))
    counted = (tokens, num_prompt, num_tokens, occurrences, max_len, stride, vocab_size)
    launch(_count_occurrences, grid, *counted, TILE=TILE)
    launch(
        _penalty_kernel,
        grid,
        logits,
        tokens,
        num_tokens,
        occurrences,
        penalties.repetition,
        penalties.presence,
        penalties.frequency,
        max_len,
        logits.stride(0),
        stride,
        vocab_size,
        TILE=TILE,
    )


@jit(unspecialized=("num_pairs", "num_rows"))
def _bias_kernel(
    logits,  # [R, V] float32 with a row stride of logits_stride
    rows,  # [num_pairs] int64
    tokens,  # [num_pairs] int64
    values,  # [num_pairs] float32
    num_pairs,
    num_rows,
    vocab_size,
    logits_stride,
    TILE: tl.constexpr,
):
    """Add `values[n]` to the logit of `(rows[n], tokens[n])`. One program per TILE pairs."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(rows + at, mask=at < num_pairs, other=-1)
    token = tl.load(tokens + at, mask=at < num_pairs, other=-1)
    good = (row >= 0) & (row < num_rows) & (token >= 0) & (token < vocab_size)
    value = tl.load(values + at, mask=good, other=0.0)
    pointer = logits + row * logits_stride + token
    tl.store(pointer, tl.load(pointer, mask=good, other=0.0) + value, mask=good)


def add_logit_bias_(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add biases in place: logits[rows[n], tokens[n]] += values[n].

    logits: [R, V] float32; rows, tokens: [N] int64, without duplicate pairs; values: [N] float32.
    On a GPU, pairs with a row or token out of range are ignored.
    """
    if not use_triton(logits):
        logits[rows, tokens] += values
        return
    check("logits", logits, ("R", "V"), (torch.float32,))
    check("rows", rows, ("N",), (torch.int64,), like=logits)
    check("tokens", tokens, (len(rows),), (torch.int64,), like=logits)
    check("values", values, (len(rows),), (torch.float32,), like=logits)
    grid = (-(-len(values) // TILE),)
    sizes = (len(values), *logits.shape, logits.stride(0))
    launch(_bias_kernel, grid, logits, rows, tokens, values, *sizes, TILE=TILE)


def aot_cases() -> Iterator[AotCase]:
    def floats(*shape: int) -> Tensor:
        return meta(*shape, dtype=torch.float32)

    def ints(*shape: int) -> Tensor:
        return meta(*shape, dtype=torch.int64)

    yield AotCase(
        "16 rows of 8192 tokens",
        lambda: apply_penalties_(
            floats(16, 128256),
            ints(16, 8192),
            ints(16),
            ints(16),
            Penalties(floats(16), floats(16), floats(16)),
        ),
    )
    yield AotCase(
        "300 biases", lambda: add_logit_bias_(floats(16, 128256), ints(300), ints(300), floats(300))
    )
