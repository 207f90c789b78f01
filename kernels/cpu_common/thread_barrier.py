"""Barriers for a team of threads in numba code: threads first join the team, then synchronize.

A parallel loop may get fewer threads than requested, and some threads may start late. The threads
that have started are therefore counted once, before the work is divided. A thread that starts later
gets no work. No thread ever waits for a thread that has not started.

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
"""Number of elements of the array that a team shares."""

# Indices of two counters in the shared array, far enough apart to be in separate cache lines.
_JOINED, _ARRIVED = (
    0,
    16,
)

_CLOSED = 1 << 32

MAX_JOIN_SPINS = 1 << 14
"""Maximum number of polls (about a millisecond) for which a team waits for more threads to join.
After that, the team consists of the threads that have joined."""

_SPINS_BEFORE_YIELD = 1 << 10
"""Number of polls between two calls of sched_yield (later: usleep) by a waiting thread."""

_SPINS_BEFORE_SLEEP = 1 << 16
"""Number of polls (some milliseconds) after which a waiting thread sleeps instead of yielding. At
this point, the thread for which it waits probably has no core."""

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
    """Emit the x86 PAUSE instruction, which gives resources to the core's other hardware thread."""

    def code(context, builder, signature, arguments):
        if platform.machine() == "x86_64":
            function = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, function, name), [])
        return context.get_dummy_value()

    return types.void(), code


@inner()
def backoff(spins: int) -> None:
    """Pause between two polls; from time to time, also yield the core or sleep.

    `spins` is the number of polls so far.
    """
    _pause()
    if spins % _SPINS_BEFORE_YIELD == _SPINS_BEFORE_YIELD - 1:
        if spins < _SPINS_BEFORE_SLEEP:
            _yield_core()
        else:
            _sleep(np.uint32(_SLEEP_MICROSECONDS))


@inner()
def join(barrier: BarrierState, num_threads: int) -> tuple[int, int]:
    """Join the team, and wait until it is complete.

    The team is complete when `num_threads` threads have joined, or after MAX_JOIN_SPINS polls.

    Returns:
        The index of this thread in the team and the size of the team. If the team was already
        complete, (-1, 0).
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
    """Return whether each of the `count` threads has arrived at the barrier `times` times in total.

    If the result is True, this thread sees all that those threads wrote before they arrived.
    """
    return _atomic_load(barrier, _ARRIVED) >= count * times
