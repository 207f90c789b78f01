"""Attention of the interpreter of CPU step graphs."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.cpu_amx.attend import (
    amx_scratch_size,
    attend_with_amx,
    count_starts,
    release_amx,
)
from penstock.kernels.attention.cpu_paged import attend_few_rows, visible_blocks
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.partition import f32_array as _floats
from penstock.kernels.kv_cache.cpu import rope_interleaved, rope_neox
from penstock.kernels.kv_cache.cpu_store import store_kv
from penstock.kernels.step_graph.opcodes import (
    ANGLES,
    BLOCK_SIZE,
    HEAD_DIM,
    INTERLEAVED,
    LAYER_SIZE,
    LAYER_START,
    NUM_HEADS,
    NUM_KV_HEADS,
    OUT,
    ROTARY_DIM,
    SINKS,
    SLOPES,
    VALUES_START,
    WINDOW,
    X,
)

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]


@inner(allocates=True)
def attend(
    op: Longs, scale: float, cap: float, arena: Floats, cache: Any, slots: Longs, contexts: Longs,
    tables: Any, me: int, count: int,
) -> None:  # fmt: skip
    """Allocate this thread's scratch array, and execute opcode ATTEND (`operations.Attend`)."""
    longest = 0
    for context in contexts:
        longest = max(longest, context)
    span, head_dim = (longest + 7) // 8 * 8, op[HEAD_DIM]
    row = span + (head_dim + 8) + 2 * head_dim + 1  # scores, query, sums and factor of a query row
    block = op[BLOCK_SIZE] * head_dim
    group = op[NUM_HEADS] // op[NUM_KV_HEADS]
    scratch = np.empty(group * row + 8 + block, np.float32)
    amx_scratch = np.empty(amx_scratch_size(cache, group, longest, head_dim) + 16, np.float32)
    starts, shapes = np.empty(count_starts(longest), np.int64), np.zeros(64, np.uint8)
    _attend_pieces(
        op, scale, cap, arena, cache, slots, contexts, tables, span, scratch, amx_scratch, starts,
        shapes, me, count,
    )  # fmt: skip
    release_amx(cache)


@inner()
def _attend_pieces(
    op: Longs, scale: float, cap: float, arena: Floats, cache: Any, slots: Longs, contexts: Longs,
    tables: Any, span: int, scratch: Floats, amx_scratch: Floats, starts: Longs, shapes: Any,
    me: int, count: int,
) -> None:  # fmt: skip
    """Compute attention for this thread's pairs of a token and a KV head.

    The pairs are assigned to the threads in turn. `span` is the length of the longest context,
    rounded up to a multiple of 8. Only this thread uses `scratch` and the arrays of
    `attend_with_amx` (`amx_scratch`, `starts` and `shapes`).
    """
    num_heads, num_kv_heads, head_dim = op[NUM_HEADS], op[NUM_KV_HEADS], op[HEAD_DIM]
    block_size, values_at, window = op[BLOCK_SIZE], op[VALUES_START], op[WINDOW]
    num_rows, group, all_heads = len(slots), num_heads // num_kv_heads, num_heads + 2 * num_kv_heads
    query = arena[op[X] :][: num_rows * all_heads * head_dim].reshape(num_rows, all_heads, head_dim)
    out = arena[op[OUT] :][: num_rows * num_heads * head_dim].reshape(num_rows, num_heads, head_dim)
    rows = cache[op[LAYER_START] : op[LAYER_START] + op[LAYER_SIZE]]
    sinks, slopes = _floats(op[SINKS], num_heads), _floats(op[SLOPES], num_heads)
    scores, at = scratch[: group * span], group * span
    q, at = scratch[at : at + group * (head_dim + 8)], at + group * (head_dim + 8)
    sums, at = scratch[at : at + 2 * group * head_dim], at + 2 * group * head_dim
    ones, at = scratch[at : at + group], at + group
    spare, block = scratch[at : at + 8], scratch[at + 8 :]
    spare[:] = 0
    tiles = amx_scratch[-amx_scratch.ctypes.data % 64 // 4 :]
    num_pieces = num_rows * num_kv_heads
    for piece in range(me, num_pieces, count):
        t, head = piece // num_kv_heads, piece % num_kv_heads
        own = slice(head * group, (head + 1) * group)
        _rotate(op, arena, query[t], t, head)
        to = (slots[t] // block_size * num_kv_heads + head) * block_size + slots[t] % block_size
        store_kv(query[t, num_heads + head], rows[:values_at], to, block_size)
        store_kv(query[t, num_heads + num_kv_heads + head], rows[values_at:], to, block_size)
        then = min(piece + count, num_pieces - 1)
        other, next_layout = then // num_kv_heads, (num_kv_heads, then % num_kv_heads, block_size)
        tile = (1, contexts[t], window if window else contexts[t] + 1)
        next_tile = (1, contexts[other], window if window else 1 << 30)
        layout = (num_kv_heads, head, block_size)
        if not attend_with_amx(
            t, tile, layout, query, rows, values_at, tables[t], scale, cap, sinks[own], slopes[own],
            tiles, starts, shapes, out, next_tile, next_layout, tables[other],
        ):  # fmt: skip
            attend_few_rows(
                t, tile, layout, query, rows, values_at, tables[t], scale, cap, sinks[own],
                slopes[own], q, scores, sums, ones, spare, block, out,
                visible_blocks(next_tile, block_size), tables[other], next_layout,
            )  # fmt: skip


@inner()
def _rotate(op: Longs, arena: Floats, heads: Any, t: int, head: int) -> None:
    """Apply the rotary embedding to one KV head's queries and key of token `t`, in place."""
    num_heads, num_kv_heads, rotary_dim = op[NUM_HEADS], op[NUM_KV_HEADS], op[ROTARY_DIM]
    if op[ANGLES] < 0:
        return
    cosines = arena[op[ANGLES] + 2 * t * rotary_dim :][:rotary_dim]
    sines = arena[op[ANGLES] + (2 * t + 1) * rotary_dim :][:rotary_dim]
    group = num_heads // num_kv_heads
    for number in range(group + 1):
        one = heads[num_heads + head if number == group else head * group + number]
        if op[INTERLEAVED]:
            rope_interleaved(one, cosines, sines)
        else:
            rope_neox(one, cosines, sines)
