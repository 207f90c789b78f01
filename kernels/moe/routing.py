"""Expert routing: chooses the top k experts of each token from the token's router logits.

An expert's weight is its probability p = softmax(logits). The weights of the chosen experts are
optionally divided by their sum, and multiplied by a scale (Shazeer et al., 2017; Jiang et al.,
2024). DeepSeek's routing differs in up to three ways (see `Routing`): p may be the sigmoid of each
logit; experts may be chosen by p + bias, while the weights remain p; and only experts of the
token's best groups may be chosen.

The kernel runs one program per token, with the experts in a tile [groups, experts per group]. On
ties, the kernel chooses the lowest expert number. A NaN ranks below every other score, so even a
token with NaN logits gets k valid, distinct experts and does not affect other tokens.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.activation.op import sigmoid
from penstock.kernels.triton_common.aot import AotCase, meta
from penstock.kernels.triton_common.launch import (
    FLOATS,
    check,
    jit,
    launch,
    power_of_2,
    tl,
    use_triton,
)


@dataclass(frozen=True, slots=True)
class Routing:
    """Parameters of expert routing."""

    top_k: int  # experts per token
    normalise: bool = False  # divide the weights of a token's experts by their sum
    sigmoid: bool = False  # an expert's p is the sigmoid of its logit; False: softmax over all
    num_groups: int = 1  # number of equal groups of consecutive experts
    top_groups: int = 1  # number of groups per token; together they have at least `top_k` experts
    group_best: int = 1  # a group's score is the sum of the scores of this many best experts
    scale: float = 1.0  # the weights are multiplied by this


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
        return _route_on_device(logits, routing, bias)
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


@jit
def _route(
    logits,  # [T, E] with a row stride of logits_stride
    bias,  # [E] float32; read only with HAS_BIAS
    experts,  # [T, TOP_K] int32
    weights,  # [T, TOP_K] float32
    logits_stride,
    scale,
    NUM_GROUPS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALISE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GROUPS: tl.constexpr,  # NUM_GROUPS, rounded up to a power of two
    MEMBERS: tl.constexpr,  # GROUP_SIZE, rounded up to a power of two
    RANKS: tl.constexpr,  # TOP_K, rounded up to a power of two
):
    """Choose the experts of one token and compute their weights. One program per token."""
    token = tl.program_id(0).to(tl.int64)
    group, member = tl.arange(0, GROUPS), tl.arange(0, MEMBERS)
    inside = (group[:, None] < NUM_GROUPS) & (member[None, :] < GROUP_SIZE)
    name = group[:, None] * GROUP_SIZE + member[None, :]
    row = tl.load(logits + token * logits_stride + name, mask=inside, other=float("-inf"))
    row = row.to(tl.float32)
    if SIGMOID:
        chance = 1 / (1 + tl.exp(-row))
    else:
        chance = tl.exp(row - tl.max(tl.max(row, axis=1), axis=0))
        chance = chance / tl.sum(tl.sum(chance, axis=1), axis=0)
    merit = chance
    if HAS_BIAS:
        merit += tl.load(bias + name, mask=inside, other=0.0)
    merit = tl.where(merit == merit, merit, -1e30)
    merit = tl.where(inside, merit, float("-inf"))

    if TOP_GROUPS < NUM_GROUPS:
        worth = tl.zeros((GROUPS,), tl.float32)
        left = merit
        for _ in tl.static_range(GROUP_BEST):
            worth += tl.max(left, axis=1)
            left = tl.where(member[None, :] == tl.argmax(left, axis=1)[:, None], -1e30, left)
        worth = tl.where(group < NUM_GROUPS, worth, float("-inf"))
        allowed = group < 0
        for _ in tl.static_range(TOP_GROUPS):
            best = group == tl.argmax(worth, axis=0)
            allowed = allowed | best
            worth = tl.where(best, float("-inf"), worth)
        merit = tl.where(allowed[:, None], merit, float("-inf"))

    merit = tl.reshape(merit, (GROUPS * MEMBERS,))
    chance = tl.reshape(chance, (GROUPS * MEMBERS,))
    name = tl.reshape(name, (GROUPS * MEMBERS,))
    at, rank = tl.arange(0, GROUPS * MEMBERS), tl.arange(0, RANKS)
    chosen = tl.zeros((RANKS,), tl.int32)
    weight = tl.zeros((RANKS,), tl.float32)
    for number in tl.static_range(TOP_K):
        best = at == tl.argmax(merit, axis=0)
        chosen = tl.where(rank == number, tl.sum(tl.where(best, name, 0), axis=0), chosen)
        weight = tl.where(rank == number, tl.sum(tl.where(best, chance, 0.0), axis=0), weight)
        merit = tl.where(best, float("-inf"), merit)
    if NORMALISE:
        weight = weight / (tl.sum(weight, axis=0) + 1e-20)
    tl.store(experts + token * TOP_K + rank, chosen, mask=rank < TOP_K)
    tl.store(weights + token * TOP_K + rank, weight * scale, mask=rank < TOP_K)


def _route_on_device(
    logits: Tensor, routing: Routing, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    _check(logits, routing, bias)
    num_tokens, num_experts = logits.shape
    shape = (num_tokens, routing.top_k)
    experts = logits.new_empty(shape, dtype=torch.int32)
    weights = logits.new_empty(shape, dtype=torch.float32)
    group_size = num_experts // routing.num_groups
    launch(
        _route,
        (num_tokens,),
        logits,
        weights if bias is None else bias,
        experts,
        weights,
        logits.stride(0),
        routing.scale,
        NUM_GROUPS=routing.num_groups,
        GROUP_SIZE=group_size,
        TOP_K=routing.top_k,
        TOP_GROUPS=routing.top_groups,
        GROUP_BEST=min(routing.group_best, group_size),
        SIGMOID=routing.sigmoid,
        NORMALISE=routing.normalise,
        HAS_BIAS=bias is not None,
        GROUPS=power_of_2(routing.num_groups),
        MEMBERS=power_of_2(group_size),
        RANKS=power_of_2(routing.top_k),
        num_warps=1,
    )
    return experts, weights


def _check(logits: Tensor, routing: Routing, bias: Tensor | None) -> None:
    num_experts = logits.shape[-1]
    check("logits", logits, ("T", "E"), FLOATS)
    if bias is not None:
        check("bias", bias, (num_experts,), (torch.float32,), like=logits)
    if num_experts % routing.num_groups:
        raise ValueError(
            f"routing: {num_experts} experts do not divide into {routing.num_groups} equal groups"
        )
    if not 0 < routing.top_groups <= routing.num_groups:
        raise ValueError(
            f"routing: top_groups from 1 to {routing.num_groups} expected, not {routing.top_groups}"
        )
    allowed = num_experts // routing.num_groups * routing.top_groups
    if not 0 < routing.top_k <= allowed:
        raise ValueError(f"routing: top_k from 1 to {allowed} expected, not {routing.top_k}")


def aot_cases() -> Iterator[AotCase]:
    plain, deepseek = Routing(8, True), Routing(8, True, True, 8, 4, 2, 2.5)
    wide = {"dtype": torch.float32}
    yield AotCase("qwen3 moe: 8 of 128", lambda: route(meta(64, 128), plain))
    yield AotCase(
        "deepseek v3: 8 of 256, grouped",
        lambda: route(meta(64, 256, **wide), deepseek, meta(256, **wide)),
    )
