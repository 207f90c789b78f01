"""Mixture of experts: choosing a few experts for every token, and their feed-forward products.

A router gives each token a logit an expert; the k likeliest compute, and what they give is
summed with the probabilities as weights (Shazeer et al., 2017; Jiang et al., 2024):

    y_t = sum over e in top_k(p_t) of w_te f_e(x_t),  p_t = softmax(router x_t)

with w = p, or p divided by its sum over the chosen.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def route(logits: Tensor, top_k: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """Each token's experts and their weights, the likeliest first.

    logits: [T, E]. Returns experts [T, k] int64 and weights [T, k] float32, which sum to 1 where
    `normalise`.
    """
    weights, experts = logits.to(torch.float32).softmax(-1).topk(top_k)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights


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
    return parts.sum(1)


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
