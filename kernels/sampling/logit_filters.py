"""Sampling filters (top-k, top-p, min-p, typical-p), with torch and numpy.

On a CPU, `op.sample` calls these functions. On a GPU, the kernels of `op.sample` find the same
thresholds by another method.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class FilterParams:
    """Filter parameters of R rows. The filters are applied in the order of the fields."""

    top_k: Tensor  # [R] int64: keep the k most likely tokens; 0 keeps all
    top_p: Tensor  # [R] float32: keep the fewest tokens with this total probability; 1 keeps all
    min_p: Tensor  # [R] float32: keep tokens with p >= min_p * (largest p); 0 keeps all


def apply_top_k_top_p_min_p_(logits: Tensor, cuts: FilterParams) -> None:
    """Set the logits of excluded tokens to -inf, in place.

    logits: [R, V] float32, divided by the temperature, with at least one finite value per row.
    Tokens that tie with the last kept token are kept too, so the result does not depend on the
    order of equal logits. A row's result does not depend on other rows. The most likely token is
    always kept.
    """
    floor = logits.amax(-1) + cuts.min_p.log()
    vocab_size = logits.shape[1]
    limits = torch.where(cuts.top_k > 0, cuts.top_k, vocab_size).clamp(max=vocab_size)
    if bool(((limits < vocab_size) | (cuts.top_p < 1)).any()):
        floor = torch.maximum(floor, _sorted_threshold(logits, limits, cuts.top_p))
    logits.masked_fill_(logits < floor[:, None], -torch.inf)


def _sorted_threshold(logits: Tensor, limits: Tensor, top_p: Tensor) -> Tensor:
    """Return, for each row, the smallest logit that both top-k and top-p keep: a tensor [R].

    `limits` [R] is the k of top-k for each row.
    """
    values = _descending(logits)
    among = values >= values.gather(1, limits[:, None] - 1)
    # Clamping at e^-80 avoids denormals, which are fifty times slower. The sums do not change.
    mass = (values - values[:, :1]).clamp_(min=-80).exp_() * among
    through = mass.cumsum(-1)
    enough = through - mass >= top_p[:, None] * through[:, -1:]
    kept = among & ~(enough & (top_p < 1)[:, None])
    return torch.where(kept, values, torch.inf).amin(-1)


def apply_typical_p_(logits: Tensor, typical_p: Tensor) -> None:
    """Set the logits of all but the most typical tokens to -inf, in place.

    A token is more typical the closer its surprisal, -log p, is to the distribution's entropy
    (Meister et al., "Locally typical sampling", 2022). The most typical tokens are kept until
    their total probability is at least `typical_p`. Tokens that tie with the last one are kept too.

    logits: [R, V] float32, -inf for tokens that are already excluded; typical_p: [R] float32.
    """
    shifted = logits - logits.amax(-1, keepdim=True)
    mass = shifted.clamp(min=-80).exp_().masked_fill_(shifted == -torch.inf, 0)
    # Use cumsum, because the last bits of torch.sum depend on the number of rows.
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
    """Sort each row, largest value first.

    On a CPU, numpy is used, because it sorts tens of times faster than torch.
    """
    if values.device.type != "cpu":
        return values.sort(-1, descending=True).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)).flip(-1)


def top_k_top_p_min_p_reference(logits: Tensor, cuts: FilterParams) -> Tensor:
    """Return the result that tests expect of `apply_top_k_top_p_min_p_`, in a new tensor.

    This slow reference sorts each row fully.
    """
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
    """Reference implementation of `apply_typical_p_`, one row at a time; return a new tensor."""
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
