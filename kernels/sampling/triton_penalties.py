"""Triton kernels of penalties and logit biases, and their launchers (see `penalties`).

The first kernel counts each token's occurrences in a table [P, V] with integer atomics;
the order of integer additions does not matter. The second kernel reads and clears the counts
atomically. If a token occurs at several positions, only the position that reads the count first
finds a non-zero count and changes the logit, so each logit is changed exactly once.
"""

import torch
from torch import Tensor

from penstock.kernels.triton_common.launch import jit, launch, tl


@jit(unspecialized=("max_len", "tokens_stride"))
def _occurrences_kernel(
    tokens,  # [P, L] int64 with a row stride of tokens_stride
    num_prompt,
    num_tokens,
    # [P, V] int32, initially zero. The kernel sets bit 0 of each prompt token, and adds 2 for each
    # occurrence of an answer token.
    occurrences,
    max_len,  # L
    tokens_stride,
    vocab_size,
    TILE: tl.constexpr,
):
    """Count the occurrences of each token of a row. The grid is [P, tiles of L positions]."""
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
    occurrences,  # [P, V] int32 from `_occurrences_kernel`; reset to zeros
    repetition,  # [P] float32
    presence,  # [P] float32
    frequency,  # [P] float32
    max_len,  # L
    logits_stride,
    tokens_stride,
    vocab_size,
    TILE: tl.constexpr,
):
    """Penalise each distinct token of a row once. The grid is [P, tiles of L positions]."""
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


TILE = 1024  # number of token positions (in `_bias_kernel`: of biases) per program


@jit(unspecialized=("num_pairs", "num_rows"))
def _bias_kernel(
    logits,  # [R, V] float32 with a row stride of logits_stride
    rows,  # [num_pairs] int64 row of each bias
    tokens,  # [num_pairs] int64 token of each bias
    values,  # [num_pairs] float32 biases
    num_pairs,
    num_rows,
    vocab_size,
    logits_stride,
    TILE: tl.constexpr,
):
    """Add `values[n]` to the logit of row `rows[n]` and token `tokens[n]`.

    Each program adds TILE biases.
    """
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    row = tl.load(rows + at, mask=at < num_pairs, other=-1)
    token = tl.load(tokens + at, mask=at < num_pairs, other=-1)
    good = (row >= 0) & (row < num_rows) & (token >= 0) & (token < vocab_size)
    value = tl.load(values + at, mask=good, other=0.0)
    pointer = logits + row * logits_stride + token
    tl.store(pointer, tl.load(pointer, mask=good, other=0.0) + value, mask=good)


def apply_penalties_triton_(
    logits: Tensor,
    tokens: Tensor,
    num_prompt: Tensor,
    num_tokens: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Penalise tokens in place; the arguments are those of `apply_penalties_`."""
    num_rows, vocab_size = logits.shape
    occurrences = logits.new_zeros((num_rows, vocab_size), dtype=torch.int32)
    max_len, stride = tokens.shape[1], tokens.stride(0)
    grid = (num_rows, -(-max_len // TILE))
    counted = (tokens, num_prompt, num_tokens, occurrences, max_len, stride, vocab_size)
    launch(_occurrences_kernel, grid, *counted, TILE=TILE)
    launch(
        _penalty_kernel,
        grid,
        logits,
        tokens,
        num_tokens,
        occurrences,
        repetition,
        presence,
        frequency,
        max_len,
        logits.stride(0),
        stride,
        vocab_size,
        TILE=TILE,
    )


def add_logit_bias_triton_(logits: Tensor, rows: Tensor, tokens: Tensor, values: Tensor) -> None:
    """Add biases in place; the arguments are those of `add_logit_bias_`."""
    grid = (-(-len(values) // TILE),)
    sizes = (len(values), *logits.shape, logits.stride(0))
    launch(_bias_kernel, grid, logits, rows, tokens, values, *sizes, TILE=TILE)
