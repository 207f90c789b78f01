"""Mixture of experts: choosing a few experts for every token, and their feed-forward products.

A router gives each token a logit an expert; the k likeliest compute, and what they give is
summed with the probabilities as weights (Shazeer et al., 2017; Jiang et al., 2024):

    y_t = sum over e in top_k(p_t) of w_te f_e(x_t),  p_t = softmax(router x_t)

with w = p, or p divided by its sum over the chosen, times a scale. DeepSeek's routing differs in
up to three ways (see `Routing`): p may be the sigmoid of each logit; the choice, but not the
weights, may be by p + bias; and it may be of the experts of a few groups only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.activation import sigmoid


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen and weighted."""

    top_k: int  # experts a token
    normalise: bool = False  # the weights of a token's experts sum to `scale`
    sigmoid: bool = False  # p is the sigmoid of each logit, not the softmax of all
    num_groups: int = 1  # of neighbouring experts, equally large
    top_groups: int = 1  # groups whose experts a token may have, together at least `top_k`
    group_best: int = 1  # a group counts as much as so many of its best experts together
    scale: float = 1.0  # of the weights


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each token's experts and their weights, the first choice first.

    logits: [T, E]; bias: [E] float32, added to p for the choice. Returns experts [T, k] int64 and
    weights [T, k] float32.
    """
    wide = logits.to(torch.float32)
    chances = sigmoid(wide) if routing.sigmoid else wide.softmax(-1)
    merits = chances if bias is None else chances + bias
    if routing.top_groups < routing.num_groups:
        merits = merits.masked_fill(_outside(merits, routing), -torch.inf)
    experts = merits.topk(routing.top_k).indices
    weights = chances.gather(1, experts)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * routing.scale


def _outside(merits: Tensor, routing: Routing) -> Tensor:
    """Which experts are not of a token's best groups: [T, E]."""
    groups = merits.view(len(merits), routing.num_groups, -1)
    worth = groups.topk(routing.group_best).values.sum(-1)
    best = worth.topk(routing.top_groups).indices
    outside = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return outside.repeat_interleave(groups.shape[2], dim=1)


def route_reference(
    logits: Tensor, routing: Routing, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What `route` means, token by token."""
    size = logits.shape[1] // routing.num_groups
    chosen, weights = [], []
    for row in logits.to(torch.float32):
        chances = row.sigmoid() if routing.sigmoid else row.softmax(0)
        merits = (chances if bias is None else chances + bias).tolist()
        groups = [merits[start : start + size] for start in range(0, len(merits), size)]
        worth = [sum(sorted(group)[-routing.group_best :]) for group in groups]
        best = sorted(range(len(groups)), key=lambda group: -worth[group])[: routing.top_groups]
        allowed = [expert for expert in range(len(merits)) if expert // size in best]
        experts = sorted(allowed, key=lambda expert: -merits[expert])[: routing.top_k]
        shares = chances[experts]
        chosen.append(experts)
        weights.append((shares / shares.sum() if routing.normalise else shares) * routing.scale)
    return torch.tensor(chosen), torch.stack(weights)


def expert_groups(experts: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """The chosen places (t * k + rank, ascending) of each expert that any token chose."""
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=num_experts).tolist()
    for expert, places in enumerate(torch.split(order, counts)):
        if len(places):
            yield expert, places


def mix_experts(
    x: Tensor, experts: Tensor, weights: Tensor, num_experts: int, run: Callable[..., Tensor]
) -> Tensor:
    """Sums what every token's experts make of it: x [T, D], experts and weights [T, k]; [T, D].

    `run(expert, rows)` computes one expert on rows [n, D]. A token's sum is in the order of its
    own choice, whatever other tokens are there.
    """
    top_k = experts.shape[1]
    made = torch.empty(experts.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    for expert, places in expert_groups(experts, num_experts):
        made[places] = run(expert, x[places // top_k])
    parts = made.view(*experts.shape, -1) * weights.to(x.dtype)[:, :, None]
    out = parts[:, 0]
    for rank in range(1, top_k):
        out += parts[:, rank]
    return out


def mix_experts_reference(
    x: Tensor, experts: Tensor, weights: Tensor, num_experts: int, run: Callable[..., Tensor]
) -> Tensor:
    """What `mix_experts` means, token by token and expert by expert."""
    assert int(experts.max()) < num_experts
    out = torch.zeros_like(x)
    for token, (chosen, shares) in enumerate(zip(experts.tolist(), weights, strict=True)):
        for expert, share in zip(chosen, shares, strict=True):
            out[token] += share * run(expert, x[token : token + 1])[0]
    return out
