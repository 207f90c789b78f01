"""Cutting off what is too unlikely to be drawn, and the largest of what is left, on a CPU.

`draw` puts these together; on a GPU its kernels find the same cuts in their own way.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FilterParams:
    """Of R rows: which tokens may be drawn. 0, 1 and 0 cut nothing."""

    top_k: Tensor  # [R] int64: the k likeliest
    top_p: Tensor  # [R] float32: of these the fewest that hold this much of their probability
    min_p: Tensor  # [R] float32: of these the ones this likely, measured by the likeliest


def apply_top_k_top_p_min_p_(logits: Tensor, cuts: FilterParams) -> None:
    """Sets the logits of tokens that may not be drawn to -inf, in place.

    logits: [R, V] float32, temperature applied; at least one finite a row. Tokens that tie with
    the last one kept are kept, so that the outcome depends on no order; nor does it depend on
    the other rows. The likeliest token always stays.
    """
    floor = logits.amax(-1) + cuts.min_p.log()
    vocab_size = logits.shape[1]
    limits = torch.where(cuts.top_k > 0, cuts.top_k, vocab_size).clamp(max=vocab_size)
    if bool(((limits < vocab_size) | (cuts.top_p < 1)).any()):
        floor = torch.maximum(floor, _sorted_threshold(logits, limits, cuts.top_p))
    logits.masked_fill_(logits < floor[:, None], -torch.inf)


def _sorted_threshold(logits: Tensor, limits: Tensor, top_p: Tensor) -> Tensor:
    """The least logit that top-k (`limits`) and top-p keep: [R]."""
    values = _descending(logits)
    among = values >= values.gather(1, limits[:, None] - 1)
    # Below e^-80 nothing counts, and denormal numbers would be fifty times slower.
    mass = (values - values[:, :1]).clamp_(min=-80).exp_() * among
    through = mass.cumsum(-1)
    enough = through - mass >= top_p[:, None] * through[:, -1:]
    kept = among & ~(enough & (top_p < 1)[:, None])
    return torch.where(kept, values, torch.inf).amin(-1)


def apply_typical_p_(logits: Tensor, typical_p: Tensor) -> None:
    """Keeps the fewest typical tokens that hold `typical_p` of the probability, in place.

    A token is the more typical, the closer its surprise, -log p, is to the distribution's entropy
    (Meister et al., "Locally typical sampling", 2022). The others' logits become -inf. Tokens as
    typical as the last one kept are kept.

    logits: [R, V] float32, where -inf is a token cut before; typical_p: [R] float32.
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    mass = shifted.clamp(min=-80).exp_().masked_fill_(shifted == -torch.inf, 0)
    # A running sum is the same whatever the number of rows; torch's plain sum is not.
    total = mass.cumsum(-1)[:, -1:]
    entropy = total.log() - (mass * shifted.clamp(min=-80)).cumsum(-1)[:, -1:] / total
    oddity = (total.log() - shifted - entropy).abs_()
    order = _ascending_order(oddity)
    before = mass.gather(1, order).cumsum(-1) < typical_p[:, None] * total
    last = before.sum(-1, keepdim=True).clamp_(max=logits.shape[1] - 1)
    limit = oddity.gather(1, order.gather(1, last))
    logits.masked_fill_(oddity > limit, -torch.inf)


def _ascending_order(values: Tensor) -> Tensor:
    if values.device.type != "cpu":
        return values.argsort(-1)
    return torch.from_numpy(np.argsort(values.numpy(), axis=-1))


def _descending(values: Tensor) -> Tensor:
    """Every row sorted. On a CPU numpy is tens of times faster at it than torch."""
    if values.device.type != "cpu":
        return values.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)


def argmax(scores: Tensor) -> npt.NDArray[np.integer]:
    """The place of the largest of each row, the first of equals: [S, V] to [S] on the host."""
    if scores.device.type != "cpu":
        return np.asarray(scores.argmax(-1).cpu())
    return np.asarray(scores.numpy().argmax(-1))  # tens of times faster than torch


def top_k_top_p_min_p_reference(logits: Tensor, cuts: FilterParams) -> Tensor:
    """What `apply_top_k_top_p_min_p_` means, row by row with a full sort; a new tensor."""
    out = logits.clone()
    for row, values in enumerate(logits.to(torch.float64)):
        ordered = values.sort(descending=True).values
        top_k = int(cuts.top_k[row])
        if top_k:
            ordered = ordered[ordered >= ordered[min(top_k, len(ordered)) - 1]]
        chances = ordered.softmax(-1)
        before = chances.cumsum(-1) - chances
        if cuts.top_p[row] < 1:
            ordered = ordered[before < float(cuts.top_p[row])]
        floor = max(float(ordered[-1]), float(ordered[0] + cuts.min_p[row].log()))
        out[row, values < floor] = -torch.inf
    return out


def typical_p_reference(logits: Tensor, typical_p: Tensor) -> Tensor:
    """What `apply_typical_p_` means, row by row; a new tensor."""
    out = logits.clone()
    for row, values in enumerate(logits.to(torch.float64)):
        surprise = -values.log_softmax(-1)
        chances = (-surprise).exp()
        oddity = (surprise - torch.where(chances > 0, chances * surprise, 0).sum()).abs()
        held = 0.0
        kept: list[int] = []
        for token in oddity.argsort().tolist():
            if held >= float(typical_p[row]) and oddity[token] > oddity[kept[-1]]:
                break
            held += float(chances[token])
            kept.append(token)
        out[row] = -torch.inf
        out[row, kept] = logits[row, kept]
    return out
