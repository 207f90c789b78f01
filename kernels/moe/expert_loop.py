"""Mixture of experts, one expert after another: implementation for CPUs, and its reference."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor


def expert_groups(
    experts: Tensor, num_experts: int, partial: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """Yield each chosen expert and the numbers of its choices, in ascending order.

    Choice `rank` of token t has the number t * k + rank, where k is the number of choices per
    token. With `partial`, choices whose expert is not in [0, num_experts) are left out.
    """
    chosen = experts.flatten()
    if partial:
        chosen = torch.where(is_here(chosen, num_experts), chosen, num_experts)
    order = chosen.argsort(stable=True)
    counts = torch.bincount(chosen, minlength=num_experts).tolist()
    for expert, choices in enumerate(torch.split(order, counts)[:num_experts]):
        if len(choices):
            yield expert, choices


def is_here(experts: Tensor, num_experts: int) -> Tensor:
    """Return a mask: True for choices whose expert is in [0, num_experts)."""
    return (experts >= 0) & (experts < num_experts)


def moe_forward(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    run: Callable[..., Tensor],
    partial: bool = False,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, [T, D].

    x is [T, D]; experts and weights are [T, k]. `run(expert, rows)` returns the outputs [n, D] of
    one expert for rows [n, D]. A token's outputs are summed in the order of the token's choices.
    With `partial`, choices whose expert is not in [0, num_experts) add nothing.
    """
    top_k = experts.shape[1]
    empty = torch.zeros if partial else torch.empty
    outputs = empty(experts.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    for expert, choices in expert_groups(experts, num_experts, partial):
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
    out = torch.zeros_like(x)
    for token, (chosen, token_weights) in enumerate(zip(experts.tolist(), weights, strict=True)):
        for expert, weight in zip(chosen, token_weights, strict=True):
            if 0 <= expert < num_experts:
                out[token] += weight * run(expert, x[token : token + 1])[0]
    return out
