"""Helpers for the loops of the CPU step graph.

They make array views of memory addresses, and divide work among threads.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from typing import Any

from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.simd import simd_intrinsic


def _pointers(kind: Any, code_kind: Any) -> Any:
    @simd_intrinsic
    def pointer(typing, address):
        """Convert an integer address to a typed pointer."""

        def code(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], code_kind.as_pointer())

        return types.CPointer(kind)(types.int64), code

    return pointer


_to_float = _pointers(types.float32, ir.FloatType())
_to_sum = _pointers(types.int32, ir.IntType(32))
_to_byte = _pointers(types.uint8, ir.IntType(8))


@inner()
def f32_array(address: int, count: int) -> Any:
    """Return an array view of the `count` float32 values at `address`."""
    return carray(_to_float(address), count)


@inner()
def i32_array(address: int, count: int) -> Any:
    """Return an array view of the `count` int32 values at `address`."""
    return carray(_to_sum(address), count)


@inner()
def u8_array(address: int, count: int) -> Any:
    """Return an array view of the `count` uint8 values at `address`."""
    return carray(_to_byte(address), count)


@inner()
def partition(size: int, thread: int, num_threads: int) -> tuple[int, int]:
    """Return the range [first, last) of the items that thread number `thread` processes.

    The `size` items are divided evenly among `num_threads` threads.
    """
    return size * thread // num_threads, size * (thread + 1) // num_threads
