"""Multi-head latent attention (DeepSeek-V2, 2024) over one ragged batch.

One layer's cache is [1, N, 1, S, R + P] (see `kv_cache/op`): a token has one row for all heads, its
latent c [R] and a rotated key k [P]. Head h of a token at position p, with query (q, r), attends to
the positions j <= p:

    s_j = (q · Uk c_j + r · k_j) scale,    out = sum over j of softmax(s)_j Uv c_j

`query` is [T, H, Q + P]: for each head q, then r. `up` is [H, Q + V, R]: for each head Uk [Q, R],
then Uv [V, R]. The cache already contains the rows of this step's tokens. Slots that no token
attends to may contain any value, also NaN.

The result can be computed in two forms:

- Absorbed: q is multiplied by Uk and the weighted sum by Uv, so the cached rows themselves are keys
  and values. This form needs 2 R + P multiplications per head, query and key. Decode uses it.
- Expanded (naive): keys and values of the whole context are computed in this step. This form needs
  Q + P + V multiplications per head, query and key.

Each chunk uses the form with fewer multiplications. On a GPU, the absorbed form reads the blocks in
place with the Triton kernels of `attention`: all heads share one KV head, whose keys have a tail of
P features. In all other cases, torch computes both forms over gathered blocks (`mla/torch_gather`).
In this module, `one_path` requires Triton; `mla/cpu` is for CPUs. All tokens then use the absorbed
form, and the matrix products are batch-invariant.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.attention.op import check_batch, check_device_batch, reads_bf16
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.attention.triton_launch import Batch
from penstock.kernels.attention.triton_plan import TiledPlan, TiledPlanner
from penstock.kernels.checks import FLOATS, check, check_contiguous
from penstock.kernels.fallback import record_fallback
from penstock.kernels.linear.batch_invariant import batch_invariant_bmm
from penstock.kernels.mla.torch_gather import Span, attend_absorbed_, attend_expanded_, to_device
from penstock.kernels.triton_common.launch import use_triton

Ints: TypeAlias = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class MlaPlan:
    """The MLA plan of one step, for all layers."""

    tiled: TiledPlan | None  # sequences whose absorbed form is computed by Triton kernels
    absorbed: list[Span]  # sequences whose absorbed form is computed by torch
    expanded: list[Span]
    rows: Tensor | None  # numbers of the query rows in absorbed form; None means all rows
    num_tokens: int | str  # number of query tokens; "T" if the host does not know it
    layer: Tensor  # any layer of the cache; all layers must have the same shape, dtype and device
    # [largest number of blocks of a span, S (R + P)] scratch for copies of a span's blocks
    gathered: Tensor
    one_path: bool = False  # True: results are batch-invariant, and do not depend on chunks


def plan_mla(
    query_starts: Ints,
    context_lens: Ints,
    block_tables: Ints,
    layer: Tensor,
    rank: int,
    head_dim: int,
    one_path: bool = False,
) -> MlaPlan:
    """Plan the MLA of one step.

    Args:
        query_starts: [B + 1] index of each sequence's first query row, then the number of rows.
        context_lens: [B] length of each sequence, including this step's tokens.
        block_tables: [B, M] block numbers; entries past a sequence's last block are not read.
        layer: any layer of the cache; only its shape, dtype and device are used.
        rank: R, the number of features of a latent.
        head_dim: Q + V.
        one_path: make results batch-invariant. This requires Triton kernels; on a CPU, use
            `mla_attention_cpu` instead.

    Raises:
        ValueError: an argument is invalid, or this dtype and device do not support `one_path`.
    """
    _check_layer(layer, rank)
    block_size, width = layer.shape[3:]
    check_batch(query_starts, context_lens, block_tables, layer.shape[1], block_size)
    lengths = np.diff(query_starts)
    absorbs = np.array(
        [
            one_path
            or length < 2
            or _absorbed_is_cheaper(length, context, rank, width - rank, head_dim)
            for length, context in zip(lengths.tolist(), context_lens.tolist(), strict=True)
        ],
        np.bool_,
    )
    chosen, tiled = np.flatnonzero(absorbs), None
    in_kernel = runs_kernel(layer)
    if one_path and not in_kernel:
        raise ValueError(
            f"batch-invariant MLA is not available for a KV cache of {layer.dtype} on "
            f"{layer.device}: expected float32, float16 or bfloat16 on a GPU"
        )
    if in_kernel and len(chosen):
        starts = np.concatenate(([0], np.cumsum(lengths[chosen])))
        tiled = TiledPlan.of(
            starts, context_lens[chosen], block_tables[chosen], layer.device, one_path=one_path
        )
    if not in_kernel:
        record_fallback("latent attention", layer.device, f"{layer.dtype}")
    absorbed: list[Span] = []
    expanded: list[Span] = []
    for b in np.flatnonzero((lengths > 0) & ~(absorbs & in_kernel)).tolist():
        span = Span.of(query_starts, int(context_lens[b]), block_tables[b], b, layer)
        (absorbed if absorbs[b] else expanded).append(span)
    rows = None
    if expanded:
        rows = to_device(np.flatnonzero(np.repeat(absorbs, lengths)), layer.device)
    most = max((len(span.blocks) for span in absorbed + expanded), default=0)
    gathered = layer.new_empty(most, block_size * width)
    num_tokens = int(query_starts[-1])
    return MlaPlan(tiled, absorbed, expanded, rows, num_tokens, layer, gathered, one_path)


def plan_mla_on_device(
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    layer: Tensor,
    rank: int,
    planner: TiledPlanner,
    max_context: int,
) -> MlaPlan:
    """Plan the MLA of one step from tensors on the device; all sequences use the absorbed form.

    `rank` is R. The other arguments are those of `plan_attention_on_device`.
    """
    _check_layer(layer, rank)
    batch = Batch(query_starts, context_lens, block_tables)
    check_device_batch(batch, layer, max_context)
    tiled, empty = planner.plan(batch, max_context, 0), layer.new_empty(0, 0)
    return MlaPlan(tiled, [], [], None, "T", layer, empty, planner.one_path)


def runs_kernel(layer: Tensor) -> bool:
    """Return whether Triton kernels compute the absorbed form for this layer of the cache."""
    return layer.dtype in FLOATS and use_triton(layer)


def _absorbed_is_cheaper(
    query_len: int, context: int, rank: int, rope_dim: int, head_dim: int
) -> bool:
    """Return whether the absorbed form needs no more multiplications than the expanded form."""
    pairs = query_len * context - query_len * (query_len - 1) // 2
    absorbed = query_len * rank * head_dim + pairs * (2 * rank + rope_dim)
    expanded = context * rank * head_dim + pairs * (head_dim + rope_dim)
    return absorbed <= expanded


def mla_attention(query: Tensor, layer: Tensor, up: Tensor, plan: MlaPlan, scale: float) -> Tensor:
    """Compute MLA over one layer of the paged cache.

    Args:
        query: [T, H, Q + P].
        layer: [1, N, 1, S, R + P] contiguous, of the query's dtype. The layer may also be bfloat16
            if `reads_bf16(layer)` is True.
        up: [H, Q + V, R] contiguous, of the query's dtype.
        plan: plan of this step.
        scale: factor of the scores.

    Returns:
        [T, H, V].

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    _check(query, layer, up, plan)
    rope_dim = layer.shape[4] - up.shape[2]
    query_dim = query.shape[2] - rope_dim
    keys_up, values_up = up[:, :query_dim], up[:, query_dim:]
    if plan.rows is None:
        return _absorbed(query, layer, keys_up, values_up, plan, scale)
    out = query.new_empty(*query.shape[:2], values_up.shape[1])
    if len(plan.rows):
        picked = query[plan.rows]
        out[plan.rows] = _absorbed(picked, layer, keys_up, values_up, plan, scale)
    for span in plan.expanded:
        tokens = span.tokens
        rows = span.gather(layer, plan.gathered, query.dtype)
        attend_expanded_(out[tokens], query[tokens], rows, keys_up, values_up, span.mask, scale)
    return out


def _absorbed(
    query: Tensor,
    layer: Tensor,
    keys_up: Tensor,
    values_up: Tensor,
    plan: MlaPlan,
    scale: float,
) -> Tensor:
    num_tokens, num_heads, _ = query.shape
    query_dim, rank = keys_up.shape[1:]
    wide = query.new_empty(num_tokens, num_heads, layer.shape[4])
    wide[:, :, :rank] = _by_head(query[:, :, :query_dim], keys_up.transpose(1, 2), plan.one_path)
    wide[:, :, rank:] = query[:, :, query_dim:]
    if plan.tiled is not None:
        found = plan.tiled.attend(wide, layer, ScoreMod(scale), tail=layer.shape[4] - rank)
        return _by_head(found, values_up, plan.one_path)
    sums = query.new_empty(num_heads, num_tokens, rank)
    start = 0
    for span in plan.absorbed:
        stop = start + span.tokens.stop - span.tokens.start
        rows = span.gather(layer, plan.gathered, query.dtype)
        attend_absorbed_(sums[:, start:stop], wide[start:stop], rows, span.mask, scale)
        start = stop
    return torch.bmm(sums, values_up.transpose(1, 2)).transpose(0, 1)


def _by_head(x: Tensor, weight: Tensor, batch_invariant: bool) -> Tensor:
    """Multiply `x` [T, H, K] by the transposed `weight` [H, N, K] of each head: [T, H, N]."""
    if batch_invariant:
        return batch_invariant_bmm(x, weight)
    return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)


def _check_layer(layer: Tensor, rank: int) -> None:
    check("layer", layer, (1, "N", 1, "S", "R + P"), (layer.dtype,))
    check_contiguous("layer", layer)
    if layer.shape[4] <= rank:
        raise ValueError(f"layer has {layer.shape[4]} features: expected more than {rank}")


def _check(query: Tensor, layer: Tensor, up: Tensor, plan: MlaPlan) -> None:
    check("layer", layer, plan.layer.shape, (plan.layer.dtype,), like=plan.layer)
    check_contiguous("layer", layer)
    dtypes = (layer.dtype, torch.float32) if reads_bf16(layer) else (layer.dtype,)
    check("up", up, ("H", "Q + V", "R"), dtypes, like=layer)
    check_contiguous("up", up)
    _check_layer(layer, up.shape[2])
    rope_dim = layer.shape[4] - up.shape[2]
    check("query", query, (plan.num_tokens, len(up), "Q + P"), (up.dtype,), like=layer)
    most = rope_dim + up.shape[1] - 1
    if not rope_dim < query.shape[2] <= most:
        raise ValueError(f"query has {query.shape[2]} features: expected {rope_dim + 1} to {most}")


def mla_attention_reference(
    query: Tensor,
    layer: Tensor,
    up: Tensor,
    query_starts: Ints,
    context_lens: Ints,
    block_tables: Ints,
    scale: float,
) -> Tensor:
    """Compute the result that tests expect of `plan_mla` and `mla_attention`.

    This slow reference loops over sequences and heads.
    """
    num_heads, height, rank = up.shape
    query_dim = query.shape[2] - (layer.shape[4] - rank)
    out = query.new_empty(len(query), num_heads, height - query_dim)
    for b, context in enumerate(context_lens.tolist()):
        tokens = slice(int(query_starts[b]), int(query_starts[b + 1]))
        positions = np.arange(context)
        blocks = torch.from_numpy(block_tables[b, positions // layer.shape[3]].astype(np.int64))
        rows = layer[0, blocks, 0, torch.from_numpy(positions % layer.shape[3])]
        latents, shared_key = rows[:, :rank], rows[:, rank:]
        unseen = torch.from_numpy(
            positions > positions[context - tokens.stop + tokens.start :, None]
        )
        for head in range(num_heads):
            keys = torch.cat((latents @ up[head, :query_dim].T, shared_key), 1)
            scores = query[tokens, head] @ keys.T * scale
            probs = scores.masked_fill(unseen, -torch.inf).softmax(-1)
            out[tokens, head] = probs @ (latents @ up[head, query_dim:].T)
    return out
