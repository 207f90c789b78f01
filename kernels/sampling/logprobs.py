"""Log probabilities of one given token and of the most likely tokens per row."""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.checks import check
from penstock.kernels.fallback import record_fallback
from penstock.kernels.sampling.triton_logprobs import logprobs_triton
from penstock.kernels.triton_common.launch import use_triton


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities (natural logarithm) of R rows."""

    chosen: Tensor  # [R] float32: log probability of the given token
    ranks: Tensor  # [R] int64: 1 + number of tokens that are more likely than the given token
    tokens: Tensor  # [R, n] int64: the most likely tokens, most likely first
    values: Tensor  # [R, n] float32: log probabilities of `tokens`


def logprobs(logits: Tensor, tokens: Tensor, count: int) -> Logprobs:
    """Return the log probabilities of the given tokens and of the `count` most likely tokens.

    logits: [R, V] float32; tokens: [R] int64, one per row. Raise ValueError if `count` < 0.
    """
    if count < 0:
        raise ValueError(f"count is {count}: expected at least 0")
    count = min(count, logits.shape[-1])
    if use_triton(logits):
        if count < logits.shape[-1]:
            check("logits", logits, ("R", "V"), (torch.float32,))
            check("tokens", tokens, (len(logits),), (torch.int64,), like=logits)
            return Logprobs(*logprobs_triton(logits, tokens, count))
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
