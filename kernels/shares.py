"""What the loops of a program have in common: which part is whose, and weights by their address."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from typing import Any

from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types

from penstock.kernels.lanes import written
from penstock.kernels.late_codegen import inner


def _pointers(kind: Any, code_kind: Any) -> Any:
    @written
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
def floats(address: int, count: int) -> Any:
    """So many float32 there, as an array."""
    return carray(_to_float(address), count)


@inner()
def sums(address: int, count: int) -> Any:
    """So many int32."""
    return carray(_to_sum(address), count)


@inner()
def bytes_(address: int, count: int) -> Any:
    """So many uint8."""
    return carray(_to_byte(address), count)


@inner()
def part(size: int, me: int, count: int) -> tuple[int, int]:
    """Of so many the first of this thread, and the first that is not."""
    return size * me // count, size * (me + 1) // count
