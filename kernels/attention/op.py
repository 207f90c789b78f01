"""Paged attention over one ragged batch of prefill chunks and decode tokens.

A token t at position p of a sequence attends to positions (p - window, p] of the same sequence, or
to [0, p] if there is no window. Keys K and values V are read through the sequence's block table:

    out_t = softmax(q_t K^T / sqrt(D)) V

The query is [T, Hq, D]: T tokens of the step, Hq query heads, D features per head. One layer's
cache is [2, N, H, S, W] (see `kv_cache/op`) and already contains this step's keys and values. The
step has B sequences, and the block tables are [B, M]. Query heads [h G, (h + 1) G) read KV head h,
with G = Hq / H. Slots that no token attends to may contain any value, also NaN. `ScoreMod` can
change the scores before the softmax. On a CPU, a float32 query may read a bfloat16 cache; the
arithmetic is then float32. A query of any dtype may read an FP8 or INT8 cache.

`plan_attention` prepares everything that depends only on the batch. It is called once per step for
all layers with the same window. If the lengths are on the GPU, `plan_attention_on_device` is called
instead. On a GPU, Triton kernels read the blocks in place (`attention/triton`, planned by
`attention/triton_plan` and launched by `attention/triton_launch`). On a CPU, numba loops read the
blocks of single tokens and short sequences in place (`attention/cpu_plan`), and with AMX those of
all sequences. For other sequences, torch computes attention over gathered blocks
(`attention/torch_gather`).
"""

from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.attention.cpu_plan import loops_name, supports_cpu_paged
from penstock.kernels.attention.score_mod import PLAIN, ScoreMod
from penstock.kernels.attention.torch_gather import GatheredPlan
from penstock.kernels.attention.triton_launch import Batch
from penstock.kernels.attention.triton_plan import TiledPlan, TiledPlanner
from penstock.kernels.checks import FLOATS, check, check_contiguous
from penstock.kernels.cpu_common.deferred_loops import is_deferred
from penstock.kernels.fallback import record_fallback
from penstock.kernels.kv_cache.format import dequantize, format_of, num_features
from penstock.kernels.triton_common.launch import use_triton

Ints: TypeAlias = npt.NDArray[np.integer]

MIN_SHARED_TOKENS = 8
"""Smallest number of decoding sequences for which cascade attention is used for a shared prefix.
This value has not been chosen by measurement yet."""


class BackendPlan(Protocol):
    """Plan of one backend: `GatheredPlan`, `TiledPlan`, or a plan of an external backend."""

    def attend(self, query: Tensor, layer: Tensor, scores: ScoreMod) -> Tensor:
        """Return the attention output [T, Hq, D]; the arguments are those of `paged_attention`."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The attention plan of one step, for all layers with the same window."""

    backend: BackendPlan
    layer: Tensor  # any layer of the cache; all layers must have the same shape, dtype and device
    num_tokens: int | str  # number of query tokens; "T" if the host does not know it


def runs_kernel(layer: Tensor) -> bool:
    """Return whether attention over this layer of the cache is computed by Triton kernels."""
    reads = layer.dtype in FLOATS or format_of(layer.dtype).has_scales
    return reads and num_features(layer) <= 256 and use_triton(layer)


def plan_attention(
    query_starts: Ints,
    context_lens: Ints,
    block_tables: Ints,
    layer: Tensor,
    window: int = 0,
    one_path: bool = False,
    use_cascade: bool = False,
) -> AttentionPlan:
    """Plan the attention of one step.

    Args:
        query_starts: [B + 1] index of each sequence's first query row, then the number of rows.
        context_lens: [B] length of each sequence, including this step's tokens.
        block_tables: [B, M] block numbers; entries past a sequence's last block are not read.
        layer: any layer of the cache; only its shape, dtype and device are used.
        window: number of positions that a token attends to, including its own; 0 for all.
        one_path: make results batch-invariant: the result for a token is bitwise identical for
            all batches and for all splits of the prompt into chunks.
        use_cascade: read a prefix that is common to all sequences only once (cascade attention).
            The last bits of a result may then depend on the other sequences of the batch.

    Raises:
        ValueError: an argument is invalid, or this dtype and device do not support `one_path`.
    """
    _check_layer(layer)
    check_batch(query_starts, context_lens, block_tables, layer.shape[1], layer.shape[3])
    num_tokens = int(query_starts[-1])
    if runs_kernel(layer):
        lengths, prefix = np.diff(query_starts), 0
        cascades = use_cascade and not (one_path or window)
        if cascades and len(lengths) >= MIN_SHARED_TOKENS and (lengths == 1).all():
            prefix = _shared_positions(context_lens, block_tables, layer.shape[3])
        backend = TiledPlan.of(
            query_starts, context_lens, block_tables, layer.device, window, prefix, one_path
        )  # fmt: skip
        return AttentionPlan(backend, layer, num_tokens)
    record_fallback("attention", layer.device, f"{layer.dtype}, {num_features(layer)} features")
    supported = supports_cpu_paged(layer.device, layer.dtype)
    reads_paged = supported and not is_deferred(loops_name(layer.dtype))
    gathered = GatheredPlan.of(
        query_starts, context_lens, block_tables, layer, window, reads_paged, one_path
    )  # fmt: skip
    return AttentionPlan(gathered, layer, num_tokens)


def plan_attention_on_device(
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    layer: Tensor,
    planner: TiledPlanner,
    max_context: int,
    window: int = 0,
) -> AttentionPlan:
    """Plan the attention of one step from int32 tensors on the layer's device, for Triton kernels.

    The caller must have called `planner.prepare` with the lengths of this step. The host does not
    read the values of the tensors. The values may therefore differ at each replay of a captured
    CUDA graph, if `planner.prepare` is called before each replay. The caller must ensure that the
    values satisfy the conditions of `check_batch`, and that every context has at most `max_context`
    positions. The other arguments are those of `plan_attention`.
    """
    _check_layer(layer)
    batch = Batch(query_starts, context_lens, block_tables)
    check_device_batch(batch, layer, max_context)
    return AttentionPlan(planner.plan(batch, max_context, window), layer, "T")


def reads_bf16(layer: Tensor) -> bool:
    """Return whether this layer of the cache is bfloat16, and float32 queries may read it.

    They may read it on a CPU, unless Triton is used.
    """
    return layer.dtype == torch.bfloat16 and layer.device.type == "cpu" and not use_triton(layer)


def _shared_positions(context_lens: Ints, block_tables: Ints, block_size: int) -> int:
    """Return the length, in positions, of the prefix of full blocks that all sequences share.

    The block with the last position of the shortest sequence is not part of the prefix.
    """
    width = int(context_lens.min() - 1) // block_size
    if not width or (block_tables[:, 0] != block_tables[0, 0]).any():
        return 0
    same = (block_tables[:, :width] == block_tables[0, :width]).all(0)
    return int(width if same.all() else same.argmin()) * block_size


def paged_attention(
    query: Tensor,
    layer: Tensor,
    plan: AttentionPlan,
    scores: ScoreMod = PLAIN,
) -> Tensor:
    """Compute attention over one layer of the paged cache.

    Args:
        query: [T, Hq, D].
        layer: [2, N, H, S, W] contiguous. The format must be FP8, INT8, the query's dtype or
            bfloat16 (see `reads_bf16`).
        plan: plan of this step.
        scores: changes to the scores before the softmax.

    Returns:
        [T, Hq, D] of the query's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not match.
    """
    _check(query, layer, plan, scores)
    return plan.backend.attend(query, layer, scores)


def check_batch(
    query_starts: Ints, context_lens: Ints, block_tables: Ints, num_blocks: int, block_size: int
) -> None:
    """Raise ValueError unless shapes and lengths are valid and every position has a valid block."""
    batch, width = len(context_lens), block_tables.shape[-1]
    if query_starts.shape != (batch + 1,) or block_tables.shape != (batch, width):
        raise ValueError(
            f"query_starts has shape {list(query_starts.shape)} and block_tables has shape "
            f"{list(block_tables.shape)}: expected [{batch + 1}] and [{batch}, M]"
        )
    lengths = np.diff(query_starts)
    if query_starts[0] != 0 or (lengths < 0).any():
        raise ValueError(
            f"query_starts is {query_starts.tolist()!s:.80}: expected a list that starts with 0 "
            "and never decreases"
        )
    if (context_lens < lengths).any():
        b = int((context_lens < lengths).argmax())
        raise ValueError(
            f"context_lens[{b}] is {context_lens[b]}: expected at least {lengths[b]}, the number "
            "of query tokens of this sequence"
        )
    used = np.where(lengths > 0, -(-context_lens // block_size), 0)[:, None]
    if (used > width).any():
        raise ValueError(f"block_tables has {width} columns: expected at least {used.max()}")
    outside = (block_tables < 0) | (block_tables >= num_blocks)
    outside &= np.arange(width) < used
    if outside.any():
        b, at = np.argwhere(outside)[0].tolist()
        raise ValueError(
            f"block_tables[{b}, {at}] is {block_tables[b, at]}: expected a block number from 0 to "
            f"{num_blocks - 1}"
        )


def check_device_batch(batch: Batch, layer: Tensor, max_context: int) -> None:
    """Raise ValueError if a shape, dtype or device of the batch is wrong.

    `max_context` must fit into the block tables. The function does not read the tensors' values.
    """
    int32 = (torch.int32,)
    check("context_lens", batch.context_lens, ("B",), int32, like=layer)
    num_rows = len(batch.context_lens)
    check("query_starts", batch.query_starts, (num_rows + 1,), int32, like=layer)
    check("block_tables", batch.tables, (num_rows, "M"), int32, like=layer)
    num_columns, block_size = batch.tables.shape[1], layer.shape[3]
    if max_context > num_columns * block_size:
        raise ValueError(
            f"max_context is {max_context}: expected at most {num_columns * block_size}, because "
            f"block_tables has {num_columns} columns of {block_size}-token blocks"
        )


def _check_layer(layer: Tensor) -> None:
    check("layer", layer, (2, "N", "H", "S", "W"), (layer.dtype,))
    check_contiguous("layer", layer)


def _check(query: Tensor, layer: Tensor, plan: AttentionPlan, scores: ScoreMod) -> None:
    num_heads, head_dim, planned = layer.shape[2], num_features(layer), plan.layer
    check("layer", layer, planned.shape, (planned.dtype,), like=planned)
    check_contiguous("layer", layer)
    dtypes: tuple[torch.dtype, ...] = (layer.dtype,)
    if format_of(layer.dtype).has_scales:
        dtypes = FLOATS
    elif reads_bf16(layer):
        dtypes = (layer.dtype, torch.float32)
    check("query", query, (plan.num_tokens, "Hq", head_dim), dtypes, like=layer)
    if query.shape[1] % num_heads:
        raise ValueError(f"query has {query.shape[1]} heads: expected a multiple of {num_heads}")
    if query.stride(1) != head_dim:
        raise ValueError(f"query has stride {query.stride(1)} between heads: expected {head_dim}")
    for name, values in (("sinks", scores.sinks), ("slopes", scores.slopes)):
        if values is not None:
            check(name, values, query.shape[1:2], FLOATS, like=query)


def paged_attention_reference(
    query: Tensor,
    layer: Tensor,
    query_starts: Ints,
    context_lens: Ints,
    block_tables: Ints,
    window: int = 0,
    scores: ScoreMod = PLAIN,
) -> Tensor:
    """Compute the result that tests expect of `plan_attention` and `paged_attention`.

    This slow reference loops over sequences and heads.
    """
    num_heads, block_size = layer.shape[2:4]
    layer = dequantize(layer, query.dtype)
    out = torch.empty_like(query)
    for b, context in enumerate(context_lens.tolist()):
        tokens = slice(int(query_starts[b]), int(query_starts[b + 1]))
        positions = np.arange(context - tokens.stop + tokens.start, context)[:, None]
        key_positions = np.arange(
            max(context - len(positions) - window + 1, 0) if window else 0, context
        )
        seen = key_positions <= positions
        if window:
            seen &= key_positions > positions - window
        blocks = torch.from_numpy(block_tables[b, key_positions // block_size].astype(np.int64))
        offsets = torch.from_numpy(key_positions % block_size)
        distances = torch.from_numpy(key_positions - positions)
        for head in range(query.shape[1]):
            keys, values = layer[:, blocks, head * num_heads // query.shape[1], offsets]
            raw = query[tokens, head] @ keys.T * (scores.scale or query.shape[2] ** -0.5)
            probs = _probabilities_reference(raw, torch.from_numpy(seen), distances, scores, head)
            out[tokens, head] = probs @ values
    return out


def _probabilities_reference(
    raw: Tensor, seen: Tensor, distances: Tensor, scores: ScoreMod, head: int
) -> Tensor:
    if scores.cap:
        raw = scores.cap * (raw / scores.cap).tanh()
    if scores.slopes is not None:
        raw = raw + scores.slopes[head] * distances
    raw = raw.masked_fill(~seen, -torch.inf)
    if scores.sinks is None:
        return raw.softmax(-1)
    sinks = scores.sinks[head].expand(len(raw), 1)
    return torch.cat((raw, sinks), 1).softmax(-1)[:, :-1]
