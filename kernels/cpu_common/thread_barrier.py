"""Threads that compute together, for loops that numba compiles: they join, and then meet.

A loop over threads may have fewer of them than it asked for, or get them late. Whoever is there is
counted once, before the work is divided: others come too late and have nothing to do. So nobody
ever waits for a thread that does not run.

What they share is an array of TEAM numbers of 64 bits, all zero before they are started.
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
"""Numbers that a team shares."""

_JOINED, _ARRIVED = (
    0,
    16,
)  # which of them; far from each other, so that they are in lines of their own

_CLOSED = 1 << 32

MAX_JOIN_SPINS = 1 << 14
"""Looks at who has joined before those who have go on without the others; about a millisecond."""

_SPINS_BEFORE_YIELD = 1 << 10
"""After so many a thread that waits lets others have its core,"""

_SPINS_BEFORE_SLEEP = 1 << 16
"""and after so many, some milliseconds, it sleeps: what it waits for has no core."""

_SLEEP_MICROSECONDS = 50  # microseconds

_yield_core = types.ExternalFunction("sched_yield", types.int32())
_sleep: Any = types.ExternalFunction("usleep", types.int32(types.uint32))


def _pointer(context, builder, signature, arguments):
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(array.data, [arguments[1]])


@simd_intrinsic
def _atomic_load(typing, array, at):
    """What is there now, and what was written before it was."""

    def code(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature, arguments)
        return builder.load_atomic(pointer, "acquire", align=8)

    return types.int64(array, types.intp), code


@simd_intrinsic
def _atomic_increment(typing, array, at):
    """Adds one."""

    def code(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature, arguments)
        return builder.atomic_rmw("add", pointer, ir.Constant(ir.IntType(64), 1), "acq_rel")

    return types.int64(array, types.intp), code


@simd_intrinsic
def _compare_exchange(typing, array, at, old, new):
    """Whether it was `old`, and so is `new`."""

    def code(context, builder, signature, arguments):
        pointer = _pointer(context, builder, signature, arguments)
        done = builder.cmpxchg(pointer, arguments[2], arguments[3], "acq_rel", "acquire")
        return builder.extract_value(done, 1)

    return types.boolean(array, types.intp, types.int64, types.int64), code


@simd_intrinsic
def _pause(typing):
    """Leaves a core that computes two threads to the other one for a moment."""

    def code(context, builder, signature, arguments):
        if platform.machine() == "x86_64":
            function = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, function, name), [])
        return context.get_dummy_value()

    return types.void(), code


@inner()
def backoff(spins: int) -> None:
    """To be called between two looks at what others do, with their number so far."""
    _pause()
    if spins % _SPINS_BEFORE_YIELD == _SPINS_BEFORE_YIELD - 1:
        if spins < _SPINS_BEFORE_SLEEP:
            _yield_core()
        else:
            _sleep(np.uint32(_SLEEP_MICROSECONDS))


@inner()
def join(barrier: BarrierState, num_threads: int) -> tuple[int, int]:
    """This thread's number in the team, and how many there are; (-1, 0): it came too late."""
    number = _atomic_load(barrier, _JOINED)
    while number < _CLOSED and not _compare_exchange(barrier, _JOINED, number, number + 1):
        number = _atomic_load(barrier, _JOINED)
    if number >= _CLOSED:
        return -1, 0
    looks = 0
    while True:
        joined = _atomic_load(barrier, _JOINED)
        if joined >= _CLOSED:
            return number, joined - _CLOSED
        if joined == num_threads or looks == MAX_JOIN_SPINS:
            _compare_exchange(barrier, _JOINED, joined, joined + _CLOSED)
        else:
            backoff(looks)
            looks += 1


@inner()
def arrive(barrier: BarrierState) -> None:
    """This thread has done its part of what is to be done before they meet."""
    _atomic_increment(barrier, _ARRIVED)


@inner()
def phase_done(barrier: BarrierState, count: int, times: int) -> Any:
    """Whether all of a team of so many have arrived so many times; what they wrote before that
    can be read then."""
    return _atomic_load(barrier, _ARRIVED) >= count * times
