"""Batch-invariant MLA on a CPU: a token's result does not depend on how its prompt is chunked.

MLA is computed in the absorbed form (see `mla/op`): the cached rows are both the keys and the
values of a single KV head, which all query heads share.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kernels.attention.cpu_plan import CpuPagedPlan
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.linear.op import PackedLinear


def mla_attention_cpu(
    query: Tensor,
    layer: Tensor,
    rank: int,
    keys_up: Sequence[PackedLinear],
    values_up: Sequence[PackedLinear],
    plan: CpuPagedPlan,
    scale: float,
) -> Tensor:
    """Compute MLA over one layer of the paged cache.

    Args:
        query: [T, H, Q + P] float32.
        layer: [1, N, 1, S, R + P] float32 or bfloat16, contiguous.
        rank: R, the number of features of a latent.
        keys_up: for each head, the projection from [T, Q] to [T, R].
        values_up: for each head, the projection from [T, R] to [T, V].
        plan: plan of this step.
        scale: factor of the scores.

    Returns:
        [T, H, V] float32.
    """
    width = layer.shape[4]
    query_dim = query.shape[2] - (width - rank)
    wide = query.new_empty(*query.shape[:2], width)
    wide[:, :, rank:] = query[:, :, query_dim:]
    for head, up in enumerate(keys_up):
        wide[:, head, :rank] = up(query[:, head, :query_dim])
    # `attend_` computes values as wide as keys, so the last P features of `sums` are unused.
    sums = torch.empty_like(wide)
    plan.attend_(sums, wide, layer, ScoreMod(scale))
    return torch.stack([up(sums[:, head, :rank]) for head, up in enumerate(values_up)], 1)
