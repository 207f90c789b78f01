"""Paged attention over one ragged batch: chunks of prompts and single decoded tokens together.

Token t of sequence b, at position p, attends to that sequence's positions (p - window, p] (all up
to p without a window) through its block table:

    out_t = softmax(q_t K^T / sqrt(D)) V

query [T, Hq, D]; one layer's cache [2, N, H, S, D] (see `cache`), already holding this step's keys
and values. Query heads [h G, (h + 1) G) read KV head h, G = Hq / H. Slots that no token may see
can hold anything, NaN included. Scores may be bent on their way (`scores`). On a CPU the cache may
be of bfloat16 where the query is float32; what is computed is float32 then. A cache of
float8_e4m3fn stands for its numbers times `scales` [2, H], of keys and of values.

What depends on the batch alone is worked out once a step by `plan_attention`, or by
`plan_attention_on_device` from lengths that are on a device, and serves every layer of the same
window. On a GPU kernels read the blocks in place (`attention/triton_kernels`, launched by
`attention/triton_launch`); elsewhere numba does for single tokens (`in_place`), and the rest is
gathered for torch (`attention/torch_gather`).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.attention.cpu_plan import supports_cpu_paged
from penstock.kernels.attention.score_mod import PLAIN, ScoreMod
from penstock.kernels.attention.torch_gather import GatheredPlan
from penstock.kernels.attention.triton_launch import Batch, TiledPlan
from penstock.kernels.fallback import record_fallback
from penstock.kernels.triton_common.aot import CHIPS, E4M3_CHIPS, AotCase, meta
from penstock.kernels.triton_common.launch import (
    E4M3,
    FLOATS,
    check,
    check_contiguous,
    device_info,
    use_triton,
)

Ints: TypeAlias = npt.NDArray[np.integer]

MIN_SHARED_TOKENS = 8
"""Decoded tokens from which on a prefix that they share is read once for all; not yet measured."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """How one step attends; for layers of one window."""

    backend: GatheredPlan | TiledPlan
    layer: Tensor  # some layer, to hold others against
    num_tokens: int | str  # a letter: known on the device only


def runs_kernel(layer: Tensor) -> bool:
    """The rule by which the Triton kernels are taken."""
    return layer.dtype in (*FLOATS, E4M3) and layer.shape[4] <= 256 and use_triton(layer)


def plan_attention(
    query_starts: Ints,
    context_lens: Ints,
    block_tables: Ints,
    layer: Tensor,
    window: int = 0,
    one_path: bool = False,
    use_cascade: bool = False,
) -> AttentionPlan:
    """Prepares a step.

    query_starts: [B + 1], context_lens: [B] (this step's tokens included), block_tables: [B, M]
    (entries past a sequence's blocks are not read); layer: any layer of the cache, for its shape,
    dtype and device; window: positions that a token sees, itself included; 0: all; one_path: a
    token gets the same bits in a chunk, by itself and in any batch (ValueError where there is no
    such form); use_cascade: whether kernels may read a prefix that all
    sequences share once for all, which makes the last bits of a sequence depend on its company.
    ValueError where these cannot be.
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
    record_fallback("attention", layer.device, f"{layer.dtype}, {layer.shape[4]} features")
    reads_paged = supports_cpu_paged(layer.device, layer.dtype)
    gathered = GatheredPlan.of(
        query_starts, context_lens, block_tables, layer, window, reads_paged, one_path
    )  # fmt: skip
    return AttentionPlan(gathered, layer, num_tokens)


def plan_attention_on_device(
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    layer: Tensor,
    max_query: int,
    max_context: int,
    window: int = 0,
    one_path: bool = False,
) -> AttentionPlan:
    """As `plan_attention`, for kernels, of int32 tensors on the layer's device.

    The host reads nothing of them: what `check_batch` checks is for the caller to keep, and no
    sequence may have more tokens than `max_query` or positions than `max_context`. Then a captured
    step serves whatever the tensors hold later.
    """
    _check_layer(layer)
    batch = Batch(query_starts, context_lens, block_tables)
    check_device_batch(batch, layer, max_context)
    lengths = query_starts, context_lens
    backend = TiledPlan(batch, lengths, max_query, max_context, window, one_path=one_path)
    return AttentionPlan(backend, layer, "T")


def reads_bf16(layer: Tensor) -> bool:
    """Whether this cache of 16 bits may be read by queries of float32: by the forms of a CPU."""
    return layer.dtype == torch.bfloat16 and layer.device.type == "cpu" and not use_triton(layer)


def _shared_positions(context_lens: Ints, block_tables: Ints, block_size: int) -> int:
    """Positions whose blocks are all sequences', and before everyone's last."""
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
    scales: Tensor | None = None,
) -> Tensor:
    """Attends: query [T, Hq, D], layer [2, N, H, S, D] contiguous; [T, Hq, D] of the query's dtype.

    One dtype, unless the cache is narrower (`reads_bf16`), of float8_e4m3fn with scales [2, H]
    float32. ValueError where the shapes, dtypes or devices do not fit together.
    """
    _check(query, layer, plan, scores, scales)
    return plan.backend.attend(query, layer, scores, scales)


def check_batch(
    query_starts: Ints, context_lens: Ints, block_tables: Ints, num_blocks: int, block_size: int
) -> None:
    """ValueError unless every position of every sequence is in some block of the cache."""
    batch, width = len(context_lens), block_tables.shape[-1]
    if query_starts.shape != (batch + 1,) or block_tables.shape != (batch, width):
        raise ValueError(
            f"query_starts, block_tables: shapes [{batch + 1}] and [{batch}, M] expected, "
            f"not {list(query_starts.shape)} and {list(block_tables.shape)}"
        )
    lengths = np.diff(query_starts)
    if query_starts[0] != 0 or (lengths < 0).any():
        raise ValueError("query_starts: numbers that ascend from 0 expected")
    if (context_lens < lengths).any():
        b = int((context_lens < lengths).argmax())
        raise ValueError(
            f"context_lens: {lengths[b]} at least expected of sequence {b}, not {context_lens[b]}"
        )
    used = np.where(lengths > 0, -(-context_lens // block_size), 0)[:, None]
    if (used > width).any():
        raise ValueError(f"block_tables: {used.max()} columns expected, not {width}")
    outside = (block_tables < 0) | (block_tables >= num_blocks)
    outside &= np.arange(width) < used
    if outside.any():
        b, at = np.argwhere(outside)[0].tolist()
        raise ValueError(
            f"block_tables: blocks below {num_blocks} expected, not {block_tables[b, at]} "
            f"at [{b}, {at}]"
        )


def check_device_batch(batch: Batch, layer: Tensor, max_context: int) -> None:
    """ValueError where shapes, dtypes or devices are not those of a batch: no value is read."""
    int32 = (torch.int32,)
    check("context_lens", batch.context_lens, ("B",), int32, like=layer)
    num_rows = len(batch.context_lens)
    check("query_starts", batch.query_starts, (num_rows + 1,), int32, like=layer)
    check("block_tables", batch.tables, (num_rows, "M"), int32, like=layer)
    if max_context > batch.tables.shape[1] * layer.shape[3]:
        raise ValueError(f"block_tables: {batch.tables.shape[1]} columns end before {max_context}")


def _check_layer(layer: Tensor) -> None:
    if layer.dim() != 5 or layer.shape[0] != 2:
        raise ValueError(f"layer: shape [2, N, H, S, D] expected, not {list(layer.shape)}")
    check_contiguous("layer", layer)


def _check(
    query: Tensor, layer: Tensor, plan: AttentionPlan, scores: ScoreMod, scales: Tensor | None
) -> None:
    num_heads, head_dim, planned = layer.shape[2], layer.shape[4], plan.layer
    check("layer", layer, planned.shape, (planned.dtype,), like=planned)
    check_contiguous("layer", layer)
    narrow = layer.dtype == E4M3
    dtypes: tuple[torch.dtype, ...] = FLOATS if narrow else (layer.dtype,)
    if reads_bf16(layer):
        dtypes = (layer.dtype, torch.float32)
    check("query", query, (plan.num_tokens, "Hq", head_dim), dtypes, like=layer)
    if query.shape[1] % num_heads:
        raise ValueError(f"query: a multiple of {num_heads} heads expected, not {query.shape[1]}")
    if query.stride(1) != head_dim:
        raise ValueError(f"query: heads side by side expected, not of strides {query.stride()}")
    for name, values in (("sinks", scores.sinks), ("slopes", scores.slopes)):
        if values is not None:
            check(name, values, query.shape[1:2], FLOATS, like=query)
    if scales is not None:
        if not narrow:
            raise ValueError(f"scales: none expected for a layer of {layer.dtype}")
        check("scales", scales, (2, num_heads), (torch.float32,), like=query)
        check_contiguous("scales", scales)
    if narrow and isinstance(plan.backend, TiledPlan) and not _reads_e4m3(layer):
        raise ValueError(f"layer: {device_info(layer).name} does not compute with {layer.dtype}")


def _reads_e4m3(layer: Tensor) -> bool:
    chip = device_info(layer)
    return chip.converts_e4m3 or chip.name == "interpreter"


def paged_attention_reference(
    query: Tensor,
    layer: Tensor,
    query_starts: Ints,
    context_lens: Ints,
    block_tables: Ints,
    window: int = 0,
    scores: ScoreMod = PLAIN,
    scales: Tensor | None = None,
) -> Tensor:
    """What `plan_attention` and `paged_attention` mean, sequence and head by themselves."""
    num_heads, block_size = layer.shape[2:4]
    if scales is not None:
        layer = layer.to(query.dtype) * scales.to(query.dtype)[:, None, :, None, None]
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


def aot_cases() -> Iterator[AotCase]:
    """Decodes and chunks in one batch, of the shapes that models have."""
    bf16, half = torch.bfloat16, torch.float16
    yield _aot_case("llama 8b", bf16, bf16, (8, 4, 128), 512, 0, PLAIN)
    yield _aot_case("gemma 2", bf16, bf16, (4, 2, 256), 512, 4096, ScoreMod(cap=50.0))
    yield _aot_case("gpt-oss, fp16", half, half, (8, 8, 64), 1, 128, ScoreMod(sinks=meta(64)))
    for name, sizes, window in (("llama 8b", (8, 4, 128), 0), ("gemma 2", (4, 2, 256), 4096)):
        yield _aot_case(f"{name}, one path", bf16, bf16, sizes, 512, window, PLAIN, one_path=True)
    yield _aot_case("llama 8b, fp8 cache", bf16, E4M3, (8, 4, 128), 1, 0, PLAIN)
    yield AotCase("llama 1b, shared prefix", _aot_prefix, ("attend_tiles",), ("attend_tiles",))


def _aot_case(
    name: str,
    dtype: torch.dtype,
    cached: torch.dtype,
    sizes: tuple[int, int, int],
    max_query: int,
    window: int,
    scores: ScoreMod,
    one_path: bool = False,
) -> AotCase:
    num_heads, group, head_dim = sizes

    def call() -> None:
        layer = meta(2, 1024, num_heads, 16, head_dim, dtype=cached)
        starts, contexts = meta(33, dtype=torch.int32), meta(32, dtype=torch.int32)
        tables = meta(32, 256, dtype=torch.int32)
        plan = plan_attention_on_device(
            starts, contexts, tables, layer, max_query, 4096, window, one_path
        )
        scales = meta(2, num_heads, dtype=torch.float32) if cached == E4M3 else None
        query = meta(512, (group + 2) * num_heads, head_dim, dtype=dtype)[:, : group * num_heads]
        paged_attention(query, layer, plan, scores, scales)

    # Rows of eight bits come 16 bytes at a time too, but entries of the table outweigh them: 49%.
    streams = ("merge_partitions",) if cached == E4M3 else ("attend_tiles", "merge_partitions")
    if one_path:  # a merge reads one part at a time: a row of features beside three numbers
        streams = ("attend_tiles",)
    return AotCase(
        name,
        call,
        products=("attend_tiles",),
        streams=streams,
        chips=E4M3_CHIPS if cached == E4M3 else CHIPS,
    )


def _aot_prefix() -> None:
    layer, query = meta(2, 1024, 8, 16, 64), meta(64, 32, 64)
    starts, contexts = np.arange(65, dtype=np.int32), np.full(64, 1100, np.int32)
    plan = plan_attention(starts, contexts, np.zeros((64, 69), np.int32), layer, use_cascade=True)
    paged_attention(query, layer, plan)
