"""Helpers for the loops of the CPU step graph.

They make array views of memory addresses, and divide work among threads.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from typing import Any

from numba.core import cgutils, types
from numba.np.arrayobj import populate_array

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.simd import simd_intrinsic


def _views(kind: Any) -> Any:
    """Return an intrinsic that makes an array view of values of numba's type `kind`."""

    @simd_intrinsic
    def view(typing, address, count):
        """Return an array view of the `count` values at `address`, without a reference count."""

        def code(context, builder, signature, arguments):
            array = context.make_array(signature.return_type)(context, builder)
            size = context.get_constant(types.intp, kind.bitwidth // 8)
            populate_array(
                array, builder.inttoptr(arguments[0], array.data.type),
                cgutils.pack_array(builder, [arguments[1]]), cgutils.pack_array(builder, [size]),
                size, None,
            )  # fmt: skip
            return array._getvalue()

        return types.Array(kind, 1, "C")(types.int64, types.intp), code

    return view


f32_array, i32_array, u8_array = _views(types.float32), _views(types.int32), _views(types.uint8)
"""Array views of the memory at an address: `f32_array(address, count)`."""


@inner()
def partition(size: int, thread: int, num_threads: int) -> tuple[int, int]:
    """Return the range [first, last) of the items that thread number `thread` processes.

    The `size` items are divided evenly among `num_threads` threads.
    """
    return size * thread // num_threads, size * (thread + 1) // num_threads
