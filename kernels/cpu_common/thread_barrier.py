"""Barriers for a team of threads in numba code: threads first join the team, then synchronize.

A parallel loop may get fewer threads than requested, and some of them may start late. The threads
that have started are therefore counted once, before the work is divided. A thread that starts later
gets no work, so that no thread waits for a thread that does not run.

The shared state is an array of BARRIER_WORDS int64, all zero before the threads start.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

import platform
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, types

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.simd import simd_intrinsic

BarrierState = npt.NDArray[np.int64]

BARRIER_WORDS = 24
"""Size of the array that a team shares."""

# Indices into the shared array, far enough apart to be in separate cache lines.
_JOINED, _ARRIVED = (
    0,
    16,
)

_CLOSED = 1 << 32

MAX_JOIN_SPINS = 1 << 14
"""Polls (about a millisecond) after which the threads that have joined start without the rest."""

_SPINS_BEFORE_YIELD = 1 << 10
"""Polls between calls of sched_yield by a waiting thread."""

_SPINS_BEFORE_SLEEP = 1 << 16
"""Polls (some milliseconds) after which a waiting thread sleeps between polls. The thread that it
waits for probably has no core."""

_SLEEP_MICROSECONDS = 50

_yield_core = types.ExternalFunction("sched_yield", types.int32())
_sleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))


def _pointer(context, builder, signature, arguments):
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


@simd_intrinsic
def _atomic_load(typing, array, at):
    """Load an element with acquire order: writes before the matching release become visible."""

    def code(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature, arguments)
        return builder.load_atomic(pointer, "acquire", align=8)

    return types.int64(array, types.intp), code


@simd_intrinsic
def _atomic_increment(typing, array, at):
    """Add one to an element atomically."""

    def code(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature, arguments)
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(array, types.intp), code


@simd_intrinsic
def _compare_exchange(typing, array, at, old, new):
    """Atomically replace an element by `new` if it equals `old`; return True if it was replaced."""

    def code(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature, arguments)
        done = builder.cmpxchg(pointer, arguments[2], arguments[3], "acq_rel", "acquire")
        return builder.extract_value(done, 1)

    return types.boolean(array, types.intp, types.int64, types.int64), code


@simd_intrinsic
def _pause(typing):
    """Emit the x86 PAUSE instruction, which favours the core's other hardware thread."""

    def code(context, builder, signature, arguments):
        if platform.machine() == "x86_64":
            function = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, function, name), [])
        return context.get_dummy_value()

    return types.void(), code


@inner()
def backoff(spins: int) -> None:
    """Pause, yield or sleep between two polls; `spins` is the number of polls so far."""
    _pause()
    if spins % _SPINS_BEFORE_YIELD == _SPINS_BEFORE_YIELD - 1:
        if spins < _SPINS_BEFORE_SLEEP:
            _yield_core()
        else:
            _sleep(np.uint32(_SLEEP_MICROSECONDS))


@inner()
def join(barrier: BarrierState, num_threads: int) -> tuple[int, int]:
    """Join the team; return (index of this thread, size of the team), or (-1, 0) if too late.

    The call waits until `num_threads` threads have joined, or for at most MAX_JOIN_SPINS polls.
    """
    number = _atomic_load(barrier, _JOINED)
    while number < _CLOSED and not _compare_exchange(barrier, _JOINED, number, number + 1):
        number = _atomic_load(barrier, _JOINED)
    if number >= _CLOSED:
        return -1, 0
    polls = 0
    while True:
        joined = _atomic_load(barrier, _JOINED)
        if joined >= _CLOSED:
            return number, joined - _CLOSED
        if joined == num_threads or polls == MAX_JOIN_SPINS:
            _compare_exchange(barrier, _JOINED, joined, joined + _CLOSED)
        else:
            backoff(polls)
            polls += 1


@inner()
def arrive(barrier: BarrierState) -> None:
    """Signal that this thread has reached the barrier, without waiting for other threads."""
    _atomic_increment(barrier, _ARRIVED)


@inner()
def phase_done(barrier: BarrierState, count: int, times: int) -> Any:
    """Return whether each of `count` threads has arrived at the barrier `times` times.

    If so, all writes of these threads before their arrival are visible to this thread.
    """
    return _atomic_load(barrier, _ARRIVED) >= count * times
