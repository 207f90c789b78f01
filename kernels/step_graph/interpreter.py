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
    ADDED,
    ALIGNMENT,
    ANGLES,
    ATTEND,
    BATCH_INVARIANT,
    BIAS,
    BIAS_SIZE,
    BLOCK_SIZE,
    CAP,
    CONTINUES,
    COUNT,
    EPS,
    FIRST,
    GATE,
    GATE_KIND,
    GEMV,
    GROUP_SIZE,
    HEAD_DIM,
    INTERLEAVED,
    LAYER_SIZE,
    LAYER_START,
    MATMUL_F32,
    MATMUL_INT8,
    NEXT,
    NORM,
    NUM_GROUPS,
    NUM_HEADS,
    NUM_KV_HEADS,
    OPCODE,
    OUT,
    OUT_WIDTH,
    PERMUTE,
    PERMUTE_INDEX,
    QUANTIZE,
    ROTARY_DIM,
    ROW_SCALES,
    SCALE,
    SINKS,
    SLOPES,
    TOPK_SOFTMAX,
    UNPERMUTE_SUM,
    VALUES_START,
    WEIGHT,
    WEIGHT_SCALES,
    WEIGHT_SIZE,
    WINDOW,
    X_WIDTH,
    ZERO_POINT_CORRECTION,
    X,
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
    """Execute opcode NORM, see `operations.Norm`."""
    num_groups, dim, more = op[NUM_GROUPS], op[GROUP_SIZE], arena if op[ADDED] >= 0 else arena[:0]
    weight, spare = _floats(op[WEIGHT], dim), np.empty(16, np.float32)
    first, last = _partition(num_rows * num_groups, me, count)
    for number in range(first, last):
        t, group = number // num_groups, number % num_groups
        at = op[X] + t * op[X_WIDTH] + group * dim
        out_at = op[OUT] + t * op[OUT_WIDTH] + group * dim
        norm_row(arena, at, more, op[ADDED] + t * dim, weight, eps, arena, out_at, spare)


@inner()
def _linear(
    op: Longs, arena: Floats, first_row: int, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute opcode MATMUL_F32, see `operations.MatmulF32`."""
    num_inputs, num_outputs = op[X_WIDTH], op[OUT_WIDTH]
    x, y = arena[op[X] + first_row * num_inputs :], arena[op[OUT] + first_row * num_outputs :]
    panels, bias = _floats(op[WEIGHT], op[WEIGHT_SIZE]), _floats(op[BIAS], op[BIAS_SIZE])
    if HAS_AMX and (op[BATCH_INVARIANT] or num_rows >= MIN_AMX_ROWS):
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
    """Execute opcode QUANTIZE, see `operations.Quantize`."""
    width = op[X_WIDTH]
    x = arena[op[X] + first_row * width :][: num_rows * width].reshape(num_rows, width)
    bytes_at = first_row * width
    qvalues = arena[op[OUT] :].view(np.uint8)[bytes_at:][: num_rows * width]
    row_scales = arena[op[ROW_SCALES] + first_row :][:num_rows]
    first, last = _partition(num_rows, me, count)
    quantize_rows(x, qvalues.reshape(num_rows, width), row_scales, first, last)


@inner()
def _int8_linear(
    op: Longs, arena: Floats, first_row: int, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute opcode MATMUL_INT8, see `operations.MatmulInt8`."""
    num_inputs, num_outputs = op[X_WIDTH], op[OUT_WIDTH]
    qvalues = arena[op[X] :].view(np.uint8)[first_row * num_inputs :]
    y, row_scales = arena[op[OUT] + first_row * num_outputs :], arena[op[ROW_SCALES] + first_row :]
    weights = _bytes(op[WEIGHT], op[WEIGHT_SIZE])
    correction = _sums(op[ZERO_POINT_CORRECTION], num_outputs)
    scales, bias = _floats(op[WEIGHT_SCALES], num_outputs), _floats(op[BIAS], num_outputs)
    first, last = _partition(num_outputs // ALIGNMENT, me, count)
    if HAS_AMX and first < last:
        _int8_amx_columns(
            qvalues, num_rows, num_inputs, weights, correction, row_scales, scales, bias, y,
            num_outputs, first, last,
        )  # fmt: skip


@inner()
def _attend(
    op: Longs, scale: float, cap: float, arena: Floats, cache: Any, slots: Longs, contexts: Longs,
    tables: Any, me: int, count: int,
) -> None:  # fmt: skip
    """Execute opcode ATTEND; pairs of a token and a KV head are assigned to threads in turn."""
    num_heads, num_kv_heads, head_dim = op[NUM_HEADS], op[NUM_KV_HEADS], op[HEAD_DIM]
    block_size, values_at, window = op[BLOCK_SIZE], op[VALUES_START], op[WINDOW]
    num_rows, group, all_heads = len(slots), num_heads // num_kv_heads, num_heads + 2 * num_kv_heads
    query = arena[op[X] :][: num_rows * all_heads * head_dim].reshape(num_rows, all_heads, head_dim)
    out = arena[op[OUT] :][: num_rows * num_heads * head_dim].reshape(num_rows, num_heads, head_dim)
    rows = cache[op[LAYER_START] : op[LAYER_START] + op[LAYER_SIZE]]
    sinks, slopes = _floats(op[SINKS], num_heads), _floats(op[SLOPES], num_heads)
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


@inner()
def _gate(
    op: Longs, arena: Floats, first_row: int, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute opcode GATE, see `operations.Gate`."""
    inner, scratch = op[OUT_WIDTH], gate_scratch()
    first, last = _partition(inner // 16, me, count)
    for t in range(first_row, first_row + num_rows):
        for begin in range(first * 16, last * 16, COLUMNS_AT_ONCE):
            at, size = op[X] + 2 * t * inner + begin, min(COLUMNS_AT_ONCE, last * 16 - begin)
            gate_columns(
                arena[at : at + size], arena[at + inner :][:size],
                arena[op[OUT] + t * inner + begin :][:size], op[GATE_KIND] == 1, scratch,
            )  # fmt: skip


@inner()
def _add(op: Longs, arena: Floats, num_rows: int, me: int, count: int) -> None:
    """Execute opcode ADD, see `operations.Add`."""
    first, last = _partition(num_rows * op[X_WIDTH], me, count)
    x, more = arena[op[X] + first : op[X] + last], arena[op[ADDED] + first : op[ADDED] + last]
    for i in range(len(x)):
        x[i] += more[i]


@inner()
def _prefetch_weights(op: Longs, num_prefetched: int, me: int, count: int) -> int:
    """Prefetch the next cache line of this thread's weights; return `num_prefetched` + 1."""
    num_inputs, num_outputs = op[X_WIDTH], op[OUT_WIDTH]
    if op[OPCODE] == MATMUL_INT8:
        first, last = _partition(num_outputs // ALIGNMENT, me, count)
        at = first * num_inputs * ALIGNMENT + num_prefetched * 64
        if at < last * num_inputs * ALIGNMENT:
            prefetch(_bytes(op[WEIGHT], op[WEIGHT_SIZE]), at)
        return num_prefetched + 1
    first, last = _partition(-(-num_outputs // PANEL), me, count)
    at = first * num_inputs * PANEL + num_prefetched * _LINE
    if at < last * num_inputs * PANEL:
        prefetch(_floats(op[WEIGHT], op[WEIGHT_SIZE]), at)
    return num_prefetched + 1


MAX_PREFETCHED_LINES = (1 << 20) // 64
"""Maximum number of cache lines to prefetch: 1 MiB, half of a core's L2 cache."""


@inner()
def _compute(
    op: Longs, floats: Floats, ints: Longs, arena: Floats, cache: Any, slots: Longs,
    contexts: Longs, tables: Any, rotation: int, me: int, count: int,
) -> None:  # fmt: skip
    """Execute this thread's part of an operation.

    Args:
        floats: [NUM_FLOATS] the operation's float parameters.
        rotation: number of products since the last barrier. The threads' parts of a small product
            differ in size; the rotation gives each thread different parts of successive products.
    """
    opcode, first, num_rows = op[OPCODE], ints[op[FIRST]], ints[op[COUNT]]
    thread = (me + rotation) % count
    if opcode == NORM:
        _norm(op, floats[EPS], arena, num_rows, me, count)
    elif opcode == MATMUL_F32:
        _linear(op, arena, first, num_rows, thread, count)
    elif opcode == QUANTIZE:
        _quantize(op, arena, first, num_rows, me, count)
    elif opcode == MATMUL_INT8:
        _int8_linear(op, arena, first, num_rows, thread, count)
    elif opcode == ATTEND:
        _attend(op, floats[SCALE], floats[CAP], arena, cache, slots, contexts, tables, me, count)
    elif opcode == GATE:
        _gate(op, arena, first, num_rows, me, count)
    elif opcode == ADD:
        _add(op, arena, num_rows, me, count)
    else:
        _moe_op(op, ints, arena, num_rows, me, count)


@inner()
def _moe_op(
    op: Longs, ints: Longs, arena: Floats, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute this thread's part of a mixture-of-experts operation."""
    if op[OPCODE] == GEMV:
        expert_loops.gemv(op, arena, num_rows, me, count)
    elif op[OPCODE] == TOPK_SOFTMAX:
        expert_loops.topk_softmax(op, arena, ints, num_rows, me, count)
    elif op[OPCODE] == PERMUTE_INDEX:
        expert_loops.permute_index(op, ints, num_rows, me)
    elif op[OPCODE] == PERMUTE:
        expert_loops.permute(op, arena, ints, num_rows, me, count)
    elif op[OPCODE] == UNPERMUTE_SUM:
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
    table: Any,  # [operations, NUM_COLUMNS]
    floats: Any,  # [operations, NUM_FLOATS]
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
                    op, floats[number], ints, arena, cache, slots, contexts, tables, rotation, me,
                    count,
                )  # fmt: skip
                if op[OPCODE] in (MATMUL_F32, MATMUL_INT8):
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
