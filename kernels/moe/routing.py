"""Expert routing: chooses the top k experts of each token from the token's router logits.

An expert's weight is its probability p = softmax(logits). The weights of the chosen experts are
optionally divided by their sum, and multiplied by a scale (Shazeer et al., 2017; Jiang et al.,
2024). DeepSeek's routing differs in up to three ways (see `Routing`): p may be the sigmoid of each
logit; experts may be chosen by p + bias, while the weights remain p; and only experts of the
token's best groups may be chosen.

On ties, the Triton kernel (`triton_routing`) chooses the lowest expert number. A NaN ranks below
every other score, so even a token with NaN logits gets k valid, distinct experts and does not
affect other tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.activation.op import sigmoid
from penstock.kernels.checks import FLOATS, check
from penstock.kernels.moe.triton_routing import route_triton
from penstock.kernels.triton_common.launch import use_triton


@dataclass(frozen=True, slots=True)
class Routing:
    """Parameters of expert routing."""

    top_k: int  # experts per token
    normalise: bool = False  # divide the weights of a token's experts by their sum
    sigmoid: bool = False  # True: p is the sigmoid of the logit; False: softmax over all experts
    num_groups: int = 1  # number of groups of equally many consecutive experts
    top_groups: int = 1  # number of groups per token; together they have at least `top_k` experts
    group_best: int = 1  # a group's score is the sum of the scores of this number of best experts
    scale: float = 1.0  # factor of the weights


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose each token's experts, best first, and their weights.

    Args:
        logits: [T, E].
        routing: the routing parameters.
        bias: [E] float32, added to p when experts are chosen, but not to the weights.

    Returns:
        Experts [T, k], int32 on a GPU and int64 on a CPU, and weights [T, k] float32.
    """
    if use_triton(logits):
        _check(logits, routing, bias)
        return route_triton(
            logits,
            bias,
            top_k=routing.top_k,
            normalise=routing.normalise,
            sigmoid=routing.sigmoid,
            num_groups=routing.num_groups,
            top_groups=routing.top_groups,
            group_best=routing.group_best,
            scale=routing.scale,
        )
    wide = logits.to(torch.float32)
    chances = sigmoid(wide) if routing.sigmoid else wide.softmax(-1)
    merits = chances if bias is None else chances + bias
    if routing.top_groups < routing.num_groups:
        merits = merits.masked_fill(_mask_groups(merits, routing), -torch.inf)
    experts = merits.topk(routing.top_k).indices
    weights = chances.gather(1, experts)
    if routing.normalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return experts, weights * routing.scale


def _mask_groups(merits: Tensor, routing: Routing) -> Tensor:
    """Return a mask [T, E]: True for experts outside the token's best groups."""
    groups = merits.view(len(merits), routing.num_groups, -1)
    worth = groups.topk(routing.group_best).values.sum(-1)
    best = worth.topk(routing.top_groups).indices
    outside = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
    return outside.repeat_interleave(groups.shape[2], dim=1)


def route_reference(
    logits: Tensor, routing: Routing, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Reference implementation of `route`, one token at a time."""
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
        top_weights = chances[experts]
        chosen.append(experts)
        weights.append(
            (top_weights / top_weights.sum() if routing.normalise else top_weights) * routing.scale
        )
    return torch.tensor(chosen), torch.stack(weights)


def _check(logits: Tensor, routing: Routing, bias: Tensor | None) -> None:
    num_experts = logits.shape[-1]
    check("logits", logits, ("T", "E"), FLOATS)
    if bias is not None:
        check("bias", bias, (num_experts,), (torch.float32,), like=logits)
    if num_experts % routing.num_groups:
        raise ValueError(
            f"routing.num_groups is {routing.num_groups}: expected a divisor of {num_experts}, the "
            "number of experts"
        )
    if not 0 < routing.top_groups <= routing.num_groups:
        raise ValueError(
            f"routing.top_groups is {routing.top_groups}: expected 1 to {routing.num_groups}, the "
            "number of groups"
        )
    allowed = num_experts // routing.num_groups * routing.top_groups
    if not 0 < routing.top_k <= allowed:
        raise ValueError(
            f"routing.top_k is {routing.top_k}: expected 1 to {allowed}, the number of experts in "
            f"top_groups ({routing.top_groups}) groups"
        )
