"""Latent attention in which every token is computed alike, however its prompt is cut; on a CPU.

See `mla_attention`, of which this is the absorbed form: the cached rows are the keys and values
of one KV head, which all query heads share.
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
    """Attends: query [T, H, Q + P] float32, layer [1, N, 1, S, R + P] float32 or bfloat16,
    contiguous; [T, H, V].

    rank: R; keys_up, values_up: of each head, [T, Q] to [T, R] and [T, R] to [T, V].
    """
    width = layer.shape[4]
    query_dim = query.shape[2] - (width - rank)
    wide = query.new_empty(*query.shape[:2], width)
    wide[:, :, rank:] = query[:, :, query_dim:]
    for head, up in enumerate(keys_up):
        wide[:, head, :rank] = up(query[:, head, :query_dim])
    # The rotated key is summed too, and thrown away.
    sums = torch.empty_like(wide)
    plan.attend_(sums, wide, layer, ScoreMod(scale))
    return torch.stack([up(sums[:, head, :rank]) for head, up in enumerate(values_up)], 1)
