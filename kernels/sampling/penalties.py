"""Repetition, presence and frequency penalties, and logit biases, applied in place."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.checks import check
from penstock.kernels.sampling.triton_penalties import (
    add_logit_bias_triton_,
    apply_penalties_triton_,
)
from penstock.kernels.triton_common.launch import use_triton


@dataclass(frozen=True, slots=True)
class Penalties:
    """Penalties of P rows: each field is [P] float32.

    A repetition penalty of 1, and other penalties of 0, have no effect.
    """

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
        _check(logits, tokens, num_prompt, num_tokens, penalties)
        values = (penalties.repetition, penalties.presence, penalties.frequency)
        apply_penalties_triton_(logits, tokens, num_prompt, num_tokens, *values)
        return
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    valid = positions < num_tokens[:, None]
    answered = valid & (positions >= num_prompt[:, None])
    # Replace padding by the first token of the row. This does not change the result, because
    # duplicate tokens all write the same value.
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


def _check(
    logits: Tensor, tokens: Tensor, num_prompt: Tensor, num_tokens: Tensor, penalties: Penalties
) -> None:
    check("logits", logits, ("P", "V"), (torch.float32,))
    num_rows = len(logits)
    check("tokens", tokens, (num_rows, "L"), (torch.int64,), like=logits)
    for name, each in (("num_prompt", num_prompt), ("num_tokens", num_tokens)):
        check(name, each, (num_rows,), (torch.int64,), like=logits)
    for name in ("repetition", "presence", "frequency"):
        check(name, getattr(penalties, name), (num_rows,), (torch.float32,), like=logits)


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
    add_logit_bias_triton_(logits, rows, tokens, values)
