"""Interpreter of CPU step graphs, compiled by numba."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.activation.cpu import COLUMNS_AT_ONCE, gate_columns, gate_scratch
from penstock.kernels.attention.cpu_paged import attend_few_rows, visible_blocks
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import use_threads
from penstock.kernels.cpu_common.partition import f32_array as _floats
from penstock.kernels.cpu_common.partition import i32_array as _sums
from penstock.kernels.cpu_common.partition import partition as _partition
from penstock.kernels.cpu_common.partition import u8_array as _bytes
from penstock.kernels.cpu_common.simd import prefetch
from penstock.kernels.cpu_common.thread_barrier import (
    BARRIER_WORDS,
    arrive,
    backoff,
    join,
    phase_done,
)
from penstock.kernels.kv_cache.cpu import rope_interleaved, rope_neox, store_kv
from penstock.kernels.linear import cpu_f32_avx512
from penstock.kernels.linear.cpu_f32_avx512 import PANEL, TILE_ROWS
from penstock.kernels.linear.cpu_packed_f32 import MIN_AMX_ROWS, has_amx
from penstock.kernels.linear.cpu_quantize_rows import quantize_rows
from penstock.kernels.moe import cpu as expert_loops
from penstock.kernels.norm.cpu import norm_row
from penstock.kernels.step_graph.opcodes import (
    ADD,
    ALIGNMENT,
    ATTEND,
    CHOOSE,
    CONTINUES,
    COUNT,
    FIRST,
    GATE,
    GATHER,
    INT8_PRODUCT,
    MIX,
    NEXT,
    NORM,
    PRODUCT,
    QUANTIZE,
    SCORE,
    SORT,
)

_f32_avx512_columns: Any = cpu_f32_avx512.compute_columns
_f32_amx_columns: Any = (
    cpu_f32_avx512.compute_columns
)  # a placeholder, like the next name: both are called only with AMX
_int8_amx_columns: Any = cpu_f32_avx512.compute_columns

HAS_AMX = has_amx()
if HAS_AMX:
    from penstock.kernels.linear.cpu_f32_amx_bf16x6 import compute_columns as _f32_amx_columns
    from penstock.kernels.linear.cpu_int8_amx import compute_columns as _int8_amx_columns

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]

_LINE = 16  # number of float32 in a cache line


@inner()
def _norm(op: Longs, eps: float, arena: Floats, num_rows: int, me: int, count: int) -> None:
    """Execute opcode NORM, see `GraphBuilder.norm`."""
    groups, dim, more = op[3], op[4], arena if op[8] >= 0 else arena[:0]
    weight, spare = _floats(op[5], dim), np.empty(16, np.float32)
    first, last = _partition(num_rows * groups, me, count)
    for number in range(first, last):
        t, group = number // groups, number % groups
        at, out_at = op[1] + t * op[2] + group * dim, op[6] + t * op[7] + group * dim
        norm_row(arena, at, more, op[8] + t * dim, weight, eps, arena, out_at, spare)


@inner()
def _linear(
    op: Longs, arena: Floats, first_row: int, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute opcode PRODUCT, see `GraphBuilder.linear`."""
    num_inputs, num_outputs = op[2], op[8]
    x, y = arena[op[1] + first_row * num_inputs :], arena[op[7] + first_row * num_outputs :]
    panels, bias = _floats(op[3], op[4]), _floats(op[5], op[6])
    if HAS_AMX and (op[9] or num_rows >= MIN_AMX_ROWS):
        first, last = _partition(num_outputs // ALIGNMENT, me, count)
        if first < last:
            _f32_amx_columns(
                x, num_rows, num_inputs, panels, bias, y, num_outputs, num_outputs // 16,
                first * ALIGNMENT // 16, last * ALIGNMENT // 16,
            )  # fmt: skip
        return
    rows = num_rows if num_rows == 1 else -(-num_rows // TILE_ROWS) * TILE_ROWS
    first, last = _partition(-(-num_outputs // PANEL), me, count)
    _f32_avx512_columns(x, rows, num_inputs, panels, bias, y, num_outputs, first, last)


@inner()
def _quantize(
    op: Longs, arena: Floats, first_row: int, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute opcode QUANTIZE: quantize the activations of an INT8 linear layer."""
    width = op[2]
    x = arena[op[1] + first_row * width :][: num_rows * width].reshape(num_rows, width)
    bytes_at = first_row * width
    qvalues = arena[op[3] :].view(np.uint8)[bytes_at:][: num_rows * width].reshape(num_rows, width)
    first, last = _partition(num_rows, me, count)
    quantize_rows(x, qvalues, arena[op[4] + first_row :][:num_rows], first, last)


@inner()
def _int8_linear(
    op: Longs, arena: Floats, first_row: int, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute opcode INT8_PRODUCT, see `GraphBuilder.linear`."""
    num_outputs = op[9]
    qvalues = arena[op[1] :].view(np.uint8)[first_row * op[2] :]
    y, factors = arena[op[8] + first_row * num_outputs :], arena[op[10] + first_row :]
    weights, shifts = _bytes(op[3], op[4]), _sums(op[5], num_outputs)
    scales, bias = _floats(op[6], num_outputs), _floats(op[7], num_outputs)
    first, last = _partition(num_outputs // ALIGNMENT, me, count)
    if HAS_AMX and first < last:
        _int8_amx_columns(
            qvalues, num_rows, op[2], weights, shifts, factors, scales, bias, y, num_outputs, first,
            last,
        )  # fmt: skip


@inner()
def _attend(
    op: Longs, scale: float, cap: float, arena: Floats, cache: Any, slots: Longs, contexts: Longs,
    tables: Any, me: int, count: int,
) -> None:  # fmt: skip
    """Execute opcode ATTEND; pairs of a token and a KV head are assigned to threads in turn."""
    num_heads, num_kv_heads, head_dim, block_size = op[2], op[3], op[4], op[5]
    num_rows, group, all_heads = len(slots), num_heads // num_kv_heads, num_heads + 2 * num_kv_heads
    query = arena[op[1] :][: num_rows * all_heads * head_dim].reshape(num_rows, all_heads, head_dim)
    out = arena[op[6] :][: num_rows * num_heads * head_dim].reshape(num_rows, num_heads, head_dim)
    rows, values_at, window = cache[op[10] : op[10] + op[11]], op[12], op[13]
    sinks, slopes = _floats(op[14], num_heads), _floats(op[15], num_heads)
    longest = 0
    for context in contexts:
        longest = max(longest, context)
    span = (longest + 7) // 8 * 8
    scores, powers = np.empty(group * span, np.float32), np.empty(span, np.int32)
    q, sums = np.empty(group * (head_dim + 8), np.float32), np.empty(group * head_dim, np.float32)
    ones, spare = np.empty(group, np.float32), np.zeros(8, np.float32)
    scratch = np.empty(block_size * head_dim, np.float32)
    num_pieces = num_rows * num_kv_heads
    for piece in range(me, num_pieces, count):
        t, head = piece // num_kv_heads, piece % num_kv_heads
        own = slice(head * group, (head + 1) * group)
        _rotate(op, arena, query[t], t, head)
        to = (slots[t] // block_size * num_kv_heads + head) * block_size + slots[t] % block_size
        store_kv(query[t, num_heads + head], rows, to * head_dim)
        store_kv(query[t, num_heads + num_kv_heads + head], rows, values_at + to * head_dim)
        then = min(piece + count, num_pieces - 1)
        other, next_context = then // num_kv_heads, contexts[then // num_kv_heads]
        attend_few_rows(
            t, (1, contexts[t], window if window else contexts[t] + 1),
            (num_kv_heads, head, block_size), query, rows, values_at, tables[t], scale, cap,
            sinks[own], slopes[own], q, scores, powers, sums, ones, spare, scratch, out,
            visible_blocks((1, next_context, window if window else 1 << 30), block_size),
            tables[other],
            (num_kv_heads, then % num_kv_heads, block_size),
        )  # fmt: skip


@inner()
def _rotate(op: Longs, arena: Floats, heads: Any, t: int, head: int) -> None:
    """Apply the rotary embedding to one KV head's queries and key of token `t`, in place."""
    num_heads, num_kv_heads, rotary_dim = op[2], op[3], op[8]
    if op[7] < 0:
        return
    cosines = arena[op[7] + 2 * t * rotary_dim :][:rotary_dim]
    sines = arena[op[7] + (2 * t + 1) * rotary_dim :][:rotary_dim]
    group = num_heads // num_kv_heads
    for number in range(group + 1):
        one = heads[num_heads + head if number == group else head * group + number]
        if op[9]:
            rope_interleaved(one, cosines, sines)
        else:
            rope_neox(one, cosines, sines)


@inner()
def _gate(
    op: Longs, arena: Floats, first_row: int, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute opcode GATE, see `GraphBuilder.gate`."""
    inner, scratch = op[2], gate_scratch()
    first, last = _partition(inner // 16, me, count)
    for t in range(first_row, first_row + num_rows):
        for begin in range(first * 16, last * 16, COLUMNS_AT_ONCE):
            at, size = op[1] + 2 * t * inner + begin, min(COLUMNS_AT_ONCE, last * 16 - begin)
            gate_columns(
                arena[at : at + size], arena[at + inner :][:size],
                arena[op[3] + t * inner + begin :][:size], op[4] == 1, scratch,
            )  # fmt: skip


@inner()
def _add(op: Longs, arena: Floats, num_rows: int, me: int, count: int) -> None:
    """Execute opcode ADD, see `GraphBuilder.add`."""
    first, last = _partition(num_rows * op[2], me, count)
    x, more = arena[op[1] + first : op[1] + last], arena[op[3] + first : op[3] + last]
    for i in range(len(x)):
        x[i] += more[i]


@inner()
def _prefetch_weights(op: Longs, num_prefetched: int, me: int, count: int) -> int:
    """Prefetch the next cache line of this thread's weights; return `num_prefetched` + 1."""
    if op[0] == INT8_PRODUCT:
        first, last = _partition(op[9] // ALIGNMENT, me, count)
        at = first * op[2] * ALIGNMENT + num_prefetched * 64
        if at < last * op[2] * ALIGNMENT:
            prefetch(_bytes(op[3], op[4]), at)
        return num_prefetched + 1
    first, last = _partition(-(-op[8] // PANEL), me, count)
    at = first * op[2] * PANEL + num_prefetched * _LINE
    if at < last * op[2] * PANEL:
        prefetch(_floats(op[3], op[4]), at)
    return num_prefetched + 1


MAX_PREFETCHED_LINES = (1 << 20) // 64
"""Maximum number of cache lines to prefetch: 1 MiB, half of a core's L2 cache."""


@inner()
def _compute(
    op: Longs, eps: float, cap: float, ints: Longs, arena: Floats, cache: Any, slots: Longs,
    contexts: Longs, tables: Any, rotation: int, me: int, count: int,
) -> None:  # fmt: skip
    """Execute this thread's part of an operation.

    Args:
        eps: the operation's first float parameter.
        cap: the operation's second float parameter.
        rotation: number of products since the last barrier. The threads' parts of a small product
            differ in size; the rotation gives each thread different parts of successive products.
    """
    kind, first, num_rows, thread = op[0], ints[op[FIRST]], ints[op[COUNT]], (me + rotation) % count
    if kind == NORM:
        _norm(op, eps, arena, num_rows, me, count)
    elif kind == PRODUCT:
        _linear(op, arena, first, num_rows, thread, count)
    elif kind == QUANTIZE:
        _quantize(op, arena, first, num_rows, me, count)
    elif kind == INT8_PRODUCT:
        _int8_linear(op, arena, first, num_rows, thread, count)
    elif kind == ATTEND:
        _attend(op, eps, cap, arena, cache, slots, contexts, tables, me, count)
    elif kind == GATE:
        _gate(op, arena, first, num_rows, me, count)
    elif kind == ADD:
        _add(op, arena, num_rows, me, count)
    else:
        _moe_op(op, ints, arena, num_rows, me, count)


@inner()
def _moe_op(
    op: Longs, ints: Longs, arena: Floats, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute this thread's part of a mixture-of-experts operation."""
    if op[0] == SCORE:
        expert_loops.gemv(op, arena, num_rows, me, count)
    elif op[0] == CHOOSE:
        expert_loops.topk_softmax(op, arena, ints, num_rows, me, count)
    elif op[0] == SORT:
        expert_loops.permute_index(op, ints, num_rows, me)
    elif op[0] == GATHER:
        expert_loops.permute(op, arena, ints, num_rows, me, count)
    elif op[0] == MIX:
        expert_loops.unpermute_sum(op, arena, ints, num_rows, me, count)


@inner()
def _next_matmul(table: Any, ints: Longs, number: int) -> int:
    """Return the first operation from `number` on that has rows; -1 if `number` is -1."""
    while number >= 0 and ints[table[number, COUNT]] == 0:
        number += 1
    return number


@inner()
def _barrier_and_prefetch(
    barrier: Longs, table: Any, ints: Longs, number: int, times: int, num_prefetched: int,
    me: int, count: int,
) -> int:  # fmt: skip
    """Wait until all threads have reached barrier number `times`; prefetch weights while waiting.

    num_prefetched: number of cache lines of the next product that are already prefetched. Return
    the new number.
    """
    arrive(barrier)
    following, looks = _next_matmul(table, ints, table[number, NEXT]), 0
    while not phase_done(barrier, count, times):
        if following >= 0 and num_prefetched < MAX_PREFETCHED_LINES:
            num_prefetched = _prefetch_weights(table[following], num_prefetched, me, count)
        else:
            backoff(looks)
            looks += 1
    return num_prefetched


def _run(
    table: Any,  # [operations, FIELDS]
    numbers: Any,  # [operations, 2] float parameters
    ints: Longs,
    arena: Floats,
    cache: Any,  # flat KV cache
    slots: Longs,  # [T], see `CpuStepGraph.run`
    contexts: Longs,  # [T] context lengths
    tables: Any,  # [T, M] block tables
    num_threads: int,
) -> None:
    """Run all operations of a step graph; `CpuStepGraph` describes the arguments."""
    barrier = np.zeros(BARRIER_WORDS, np.int64)
    for _thread in numba.prange(num_threads):
        me, count = join(barrier, num_threads)
        num_prefetched = rotation = times = 0
        for number in range(len(table) if me >= 0 else 0):
            op = table[number]
            if ints[op[COUNT]] > 0:
                _compute(
                    op, numbers[number, 0], numbers[number, 1], ints, arena, cache, slots,
                    contexts, tables, rotation, me, count,
                )  # fmt: skip
                if op[0] in (PRODUCT, INT8_PRODUCT):
                    num_prefetched, rotation = 0, rotation + 1
            if not op[CONTINUES]:
                times, rotation = times + 1, 0
                num_prefetched = _barrier_and_prefetch(
                    barrier, table, ints, number, times, num_prefetched, me, count
                )


@cache
def compile_interpreter(narrow: bool) -> Any:
    """Return `_run` compiled for a float32 cache or, if `narrow`, a bfloat16 cache."""
    rows = "uint16" if narrow else "float32"
    signature = (
        f"void(int64[:, ::1], float32[:, ::1], int64[::1], float32[::1], {rows}[::1],"
        " int64[::1], int64[::1], int32[:, ::1], int64)"
    )
    kernel: Any = numba.njit(signature, parallel=True, nogil=True, cache=True)(_run)

    def run(*arguments: Any, num_threads: int) -> None:
        kernel(*arguments, use_threads(num_threads))

    return run
