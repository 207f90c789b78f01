"""Mixture of experts, one expert after another: implementation for CPUs, and its reference."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def expert_groups(experts: Tensor, num_experts: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each chosen expert and the numbers of its choices (t * k + rank, ascending)."""
    order = experts.flatten().argsort(stable=True)
    counts = torch.bincount(experts.flatten(), minlength=num_experts).tolist()
    for expert, choices in enumerate(torch.split(order, counts)):
        if len(choices):
            yield expert, choices


def moe_forward(
    x: Tensor, experts: Tensor, weights: Tensor, num_experts: int, run: Callable[..., Tensor]
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, [T, D].

    x is [T, D], experts and weights are [T, k]. `run(expert, rows)` returns the outputs [n, D] of
    one expert for rows [n, D]. A token's outputs are summed in the order of the token's choices.
    """
    top_k = experts.shape[1]
    outputs = torch.empty(experts.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    for expert, choices in expert_groups(experts, num_experts):
        outputs[choices] = run(expert, x[choices // top_k])
    weighted = outputs.view(*experts.shape, -1) * weights.to(x.dtype)[:, :, None]
    out = weighted[:, 0]
    for rank in range(1, top_k):
        out += weighted[:, rank]
    return out


def moe_forward_reference(
    x: Tensor, experts: Tensor, weights: Tensor, num_experts: int, run: Callable[..., Tensor]
) -> Tensor:
    """Reference implementation of `moe_forward`: one token and one expert at a time."""
    assert int(experts.max()) < num_experts
    out = torch.zeros_like(x)
    for token, (chosen, token_weights) in enumerate(zip(experts.tolist(), weights, strict=True)):
        for expert, weight in zip(chosen, token_weights, strict=True):
            out[token] += weight * run(expert, x[token : token + 1])[0]
    return out
