"""What the loops of a program have in common: which part is whose, and weights by their address."""

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
        """To what is there."""

        def code(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], code_kind.as_pointer())

        return types.CPointer(kind)(types.int64), code

    return pointer


_to_float = _pointers(types.float32, ir.FloatType())
_to_sum = _pointers(types.int32, ir.IntType(32))
_to_byte = _pointers(types.uint8, ir.IntType(8))


@inner()
def f32_array(address: int, count: int) -> Any:
    """So many float32 there, as an array."""
    return carray(_to_float(address), count)


@inner()
def i32_array(address: int, count: int) -> Any:
    """So many int32."""
    return carray(_to_sum(address), count)


@inner()
def u8_array(address: int, count: int) -> Any:
    """So many uint8."""
    return carray(_to_byte(address), count)


@inner()
def partition(size: int, thread: int, num_threads: int) -> tuple[int, int]:
    """Of so many the first of this thread, and the first that is not."""
    return size * thread // num_threads, size * (thread + 1) // num_threads
