"""Interpreter of CPU step graphs, compiled by numba."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.activation.cpu import gate_columns
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import compile_function, use_threads
from penstock.kernels.cpu_common.partition import f32_array as _floats
from penstock.kernels.cpu_common.partition import partition as _partition
from penstock.kernels.cpu_common.thread_barrier import (
    BARRIER_WORDS,
    arrive,
    backoff,
    join,
    phase_done,
)
from penstock.kernels.moe import cpu as expert_loops
from penstock.kernels.norm.cpu import norm_row
from penstock.kernels.step_graph import matmuls
from penstock.kernels.step_graph.attention import attend
from penstock.kernels.step_graph.opcodes import (
    ADD,
    ADDED,
    ATTEND,
    CAP,
    CONTINUES,
    COUNT,
    EPS,
    FIRST,
    GATE,
    GATE_KIND,
    GEMV,
    GROUP_SIZE,
    LIMIT,
    MATMUL_F32,
    MATMUL_INT4,
    MATMUL_INT8,
    MATMUL_QUANTIZED,
    NEXT,
    NORM,
    NUM_GROUPS,
    OPCODE,
    OUT,
    OUT_WIDTH,
    PERMUTE,
    PERMUTE_INDEX,
    QUANTIZE,
    QUANTIZE_BLOCKS,
    SCALE,
    TOPK_SOFTMAX,
    UNPERMUTE_SUM,
    WEIGHT,
    X_WIDTH,
    Extensions,
    X,
)

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]


@inner(allocates=True)
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
def _gate(
    op: Longs, arena: Floats, first_row: int, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute opcode GATE, see `operations.Gate`."""
    inner = op[OUT_WIDTH]
    first, last = _partition(inner // 16, me, count)
    for t in range(first_row, first_row + num_rows):
        at, size = op[X] + 2 * t * inner + first * 16, (last - first) * 16
        gate_columns(
            arena[at : at + size], arena[at + inner :][:size],
            arena[op[OUT] + t * inner + first * 16 :][:size], op[GATE_KIND] == 1,
        )  # fmt: skip


@inner()
def _add(op: Longs, arena: Floats, num_rows: int, me: int, count: int) -> None:
    """Execute opcode ADD, see `operations.Add`."""
    first, last = _partition(num_rows * op[X_WIDTH], me, count)
    x, more = arena[op[X] + first : op[X] + last], arena[op[ADDED] + first : op[ADDED] + last]
    for i in range(len(x)):
        x[i] += more[i]


MAX_PREFETCHED_LINES = (1 << 20) // 64
"""Maximum number of cache lines that a thread prefetches: 1 MiB, half of a core's L2 cache."""


@inner()
def _compute(
    op: Longs, floats: Floats, ints: Longs, arena: Floats, cache: Any, slots: Longs,
    contexts: Longs, tables: Any, rotation: int, me: int, count: int,
) -> None:  # fmt: skip
    """Execute this thread's part of an operation; do nothing for the opcodes of `Extensions`.

    Args:
        floats: [NUM_FLOATS] float parameters of the operation.
        rotation: number of products since the last barrier. The parts of a small product differ in
            size. The rotation assigns the parts of successive products to different threads, to
            balance the load.
    """
    opcode, first, num_rows = op[OPCODE], ints[op[FIRST]], ints[op[COUNT]]
    if opcode == NORM:
        _norm(op, floats[EPS], arena, num_rows, me, count)
    elif opcode == MATMUL_F32:
        matmuls.linear(op, arena, first, num_rows, (me + rotation) % count, count)
    elif opcode == ATTEND:
        attend(op, floats[SCALE], floats[CAP], arena, cache, slots, contexts, tables, me, count)
    elif opcode == GATE:
        _gate(op, arena, first, num_rows, me, count)
    elif opcode == ADD:
        _add(op, arena, num_rows, me, count)


@inner()
def _int8_op(
    op: Longs, floats: Floats, ints: Longs, arena: Floats, rotation: int, me: int, count: int
) -> None:
    """Execute this thread's part of an operation of INT8_OPCODES."""
    first, num_rows = ints[op[FIRST]], ints[op[COUNT]]
    if op[OPCODE] == QUANTIZE:
        matmuls.quantize(op, floats[LIMIT], arena, first, num_rows, me, count)
    elif op[OPCODE] == MATMUL_INT8:
        matmuls.int8_linear(op, arena, first, num_rows, (me + rotation) % count, count)


@inner()
def _codes_op(
    op: Longs, ints: Longs, arena: Floats, rotation: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute this thread's part of MATMUL_QUANTIZED, a product with weight-only codes."""
    if op[OPCODE] == MATMUL_QUANTIZED:
        thread = (me + rotation) % count
        matmuls.quantized_linear(op, arena, ints[op[FIRST]], ints[op[COUNT]], thread, count)


@inner()
def _int4_op(
    op: Longs, ints: Longs, arena: Floats, rotation: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute this thread's part of an operation of INT4_OPCODES."""
    first, num_rows = ints[op[FIRST]], ints[op[COUNT]]
    if op[OPCODE] == QUANTIZE_BLOCKS:
        matmuls.quantize_by_block(op, arena, first, num_rows, me, count)
    elif op[OPCODE] == MATMUL_INT4:
        matmuls.int4_linear(op, arena, first, num_rows, (me + rotation) % count, count)


@inner()
def _expert_op(op: Longs, ints: Longs, arena: Floats, me: int, count: int) -> None:
    """Execute this thread's part of an operation of EXPERT_OPCODES."""
    num_rows = ints[op[COUNT]]
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
    """Return the index of the first operation from `number` on that has rows in this step.

    If `number` is -1, the result is -1.
    """
    while number >= 0 and ints[table[number, COUNT]] == 0:
        number += 1
    return number


@inner()
def _barrier_and_prefetch(
    barrier: Longs, table: Any, ints: Longs, number: int, times: int, num_prefetched: int,
    me: int, count: int,
) -> int:  # fmt: skip
    """Wait until all threads have reached barrier number `times`; prefetch weights while waiting.

    `num_prefetched` is the number of cache lines of the next product that this thread has already
    prefetched. The function returns this number plus the number of newly prefetched lines.
    """
    arrive(barrier)
    following, looks = _next_matmul(table, ints, table[number, NEXT]), 0
    while not phase_done(barrier, count, times):
        if following >= 0 and num_prefetched < MAX_PREFETCHED_LINES:
            num_prefetched = matmuls.prefetch_weights(table[following], num_prefetched, me, count)
        else:
            backoff(looks)
            looks += 1
    return num_prefetched


@inner()
def _after(op: Longs, num_prefetched: int, rotation: int) -> tuple[int, int]:
    """Return the new `num_prefetched` and `rotation` after an operation.

    After a product, these are 0 and the next rotation. Other operations do not change them.
    """
    if op[OPCODE] in (MATMUL_F32, MATMUL_INT8, MATMUL_QUANTIZED, MATMUL_INT4):
        return 0, rotation + 1
    return num_prefetched, rotation


def _make_run(int8: bool, experts: bool, codes: bool, int4: bool) -> Callable[..., None]:
    """Return the interpreter with these `Extensions` as a Python function, not compiled yet.

    numba removes the branches of the other extensions before it compiles them, and its disk cache
    distinguishes functions by the values of their free variables.
    """

    def run(
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
                        op, floats[number], ints, arena, cache, slots, contexts, tables, rotation,
                        me, count,
                    )  # fmt: skip
                    if int8:
                        _int8_op(op, floats[number], ints, arena, rotation, me, count)
                    if experts:
                        _expert_op(op, ints, arena, me, count)
                    if codes:
                        _codes_op(op, ints, arena, rotation, me, count)
                    if int4:
                        _int4_op(op, ints, arena, rotation, me, count)
                    num_prefetched, rotation = _after(op, num_prefetched, rotation)
                if not op[CONTINUES]:
                    times, rotation = times + 1, 0
                    num_prefetched = _barrier_and_prefetch(
                        barrier, table, ints, number, times, num_prefetched, me, count
                    )

    return run


@cache
def compile_interpreter(rows: str, extensions: Extensions) -> Any:
    """Return the compiled interpreter.

    Args:
        rows: numpy's dtype of the flat KV cache.
        extensions: opcodes of the graphs in addition to those of a dense float32 model.
    """
    signature = (
        f"void(int64[:, ::1], float32[:, ::1], int64[::1], float32[::1], {rows}[::1],"
        " int64[::1], int64[::1], int32[:, ::1], int64)"
    )
    body = _make_run(**asdict(extensions))
    # numba names its index file after `__qualname__`. Each interpreter needs a file of its own,
    # because several processes may compile different interpreters at the same time.
    body.__qualname__ = f"run_{rows}{extensions}"
    kernel = compile_function(body, signature, parallel=True)

    def run(*arguments: Any, num_threads: int) -> None:
        kernel(*arguments, use_threads(num_threads))

    return run
