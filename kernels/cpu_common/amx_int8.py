"""Numba intrinsics for 8-bit matrix products on the CPU's matrix unit (AMX).

The module `cpu_common/amx` explains tiles. Here, A [16, 64] is uint8. B [64, 16] is int8 and stored
with groups of four rows interleaved. Sums are int32 and therefore exact (instruction TDPBUSD).
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from llvmlite import ir
from numba.core import types

from penstock.kernels.cpu_common.amx import ROWS, bytes_at, call
from penstock.kernels.cpu_common.simd import simd_intrinsic

TILE_K = 64
"""Columns of A (8-bit inputs) per tile."""

TILE = ROWS * TILE_K
"""Size of a tile in bytes."""

_BYTE, _NUMBER = ir.IntType(8), ir.IntType(64)


def _register(number: int):
    return ir.Constant(_BYTE, number)


def multiply_int8(num_rows: int, num_columns: int):
    """Return an intrinsic that adds A B to the accumulators in registers 0 to 3.

    The accumulators form a grid of `num_rows` by `num_columns` tiles. A is `qvalues[qvalues_at:]`
    with rows of `width` bytes. B is `weights[weights_at:]` with column tiles that are 16 * `width`
    bytes apart.
    """

    @simd_intrinsic
    def step(typing, qvalues, qvalues_at, width, weights, weights_at):
        def code(context, builder, signature, arguments):
            _, qvalues_at, width, _, weights_at = arguments
            tile_bytes = ir.Constant(_NUMBER, 64)
            for row in range(num_rows):
                down = builder.mul(width, ir.Constant(_NUMBER, row * ROWS))
                pointer = bytes_at(context, builder, signature, arguments, 0, [qvalues_at, down])
                call(builder, "llvm.x86.tileloadd64", _register(4 + row), pointer, width)
            spare = 4 - num_rows  # number of operand registers that are left for column tiles
            for column in range(num_columns):
                along = builder.mul(width, ir.Constant(_NUMBER, column * ROWS))
                pointer = bytes_at(context, builder, signature, arguments, 3, [weights_at, along])
                register = _register(4 + num_rows + column % spare)
                call(builder, "llvm.x86.tileloadd64", register, pointer, tile_bytes)
                for row in range(num_rows):
                    sums = _register(row * num_columns + column)
                    call(builder, "llvm.x86.tdpbusd", sums, _register(4 + row), register)
            return context.get_dummy_value()

        return types.void(qvalues, types.intp, types.intp, weights, types.intp), code

    return step


@simd_intrinsic
def multiply_tiles_int8(typing, rows, rows_at, weights, left, right):
    """Add the products of two row tiles and two column tiles to the accumulators 0 to 3.

    The row tiles are contiguous and begin at `rows[rows_at]`. The column tiles begin at
    `weights[left]` and `weights[right]`. Register 2 * r + c accumulates the product of row tile r
    and column tile c. Row tiles are loaded with a hint that they are not used again soon. The
    column tiles then stay in the L1 cache.
    """

    def code(context, builder, signature, arguments):
        _, rows_at, _, left, right = arguments
        row_bytes = ir.Constant(_NUMBER, TILE_K)

        def load(name, register, array, *offsets):
            pointer = bytes_at(context, builder, signature, arguments, array, list(offsets))
            call(builder, name, _register(register), pointer, row_bytes)

        load("llvm.x86.tileloaddt164", 4, 0, rows_at)
        load("llvm.x86.tileloaddt164", 5, 0, rows_at, ir.Constant(_NUMBER, TILE))
        for column, begin in enumerate((left, right)):
            load("llvm.x86.tileloadd64", 6 + column, 2, begin)
            for row in range(2):
                operands = (_register(each) for each in (2 * row + column, 4 + row, 6 + column))
                call(builder, "llvm.x86.tdpbusd", *operands)
        return context.get_dummy_value()

    return types.void(rows, types.intp, weights, types.intp, types.intp), code
