"""Triton kernel of expert routing, and its launcher (see `routing`).

A program handles one token, with the experts in a tile [groups, experts per group].
"""

import torch
from torch import Tensor

from penstock.kernels.triton_common.launch import jit, launch, power_of_2, tl


@jit
def _route_kernel(
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
    """Choose the experts of one token and compute their weights. The grid is [T]."""
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


def route_triton(
    logits: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    normalise: bool,
    sigmoid: bool,
    num_groups: int,
    top_groups: int,
    group_best: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the experts [T, k] int32 and weights [T, k] float32 of `logits` [T, E].

    The other arguments are those of `route` and the fields of `Routing`.
    """
    num_tokens, num_experts = logits.shape
    experts = logits.new_empty((num_tokens, top_k), dtype=torch.int32)
    weights = logits.new_empty((num_tokens, top_k), dtype=torch.float32)
    group_size = num_experts // num_groups
    launch(
        _route_kernel,
        (num_tokens,),
        logits,
        weights if bias is None else bias,
        experts,
        weights,
        logits.stride(0),
        scale,
        NUM_GROUPS=num_groups,
        GROUP_SIZE=group_size,
        TOP_K=top_k,
        TOP_GROUPS=top_groups,
        GROUP_BEST=min(group_best, group_size),
        SIGMOID=sigmoid,
        NORMALISE=normalise,
        HAS_BIAS=bias is not None,
        GROUPS=power_of_2(num_groups),
        MEMBERS=power_of_2(group_size),
        RANKS=power_of_2(top_k),
        num_warps=1,
    )
    return experts, weights
