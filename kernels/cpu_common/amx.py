"""Numba intrinsics for the CPU's matrix unit (AMX), which computes C += A B for whole tiles.

A tile register has 16 rows of 64 bytes. A [16, 32] and B [32, 16] are bfloat16, C [16, 16] is
float32. B is stored with pairs of rows interleaved: each 32-bit word of B contains the two elements
that are multiplied by the two elements in one word of A. Row i of C depends only on row i of A and
on B, and its sums are computed in a fixed order (instruction TDPBF16PS in Intel's manual). The
result for a row of A is therefore bitwise the same for any contents of the other rows.

Registers 0 to 3 are for accumulators (C), registers 4 to 7 for operands (A and B). In memory,
operands are in float32 arrays, two bfloat16 per element. Operand tiles should be aligned to a cache
line, because an unaligned load takes twice as long.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from penstock.kernels.cpu_common.amx_schedule import NUM_SPLITS, Load, Multiply
from penstock.kernels.cpu_common.simd import VECTOR_WIDTH, F32Vec, simd_intrinsic

ROWS = 16  # rows per tile
TILE = ROWS * 16  # 32-bit words per tile
TILE_K = 32  # bfloat16 inputs (columns of A) per tile

_BYTE, _NUMBER = ir.IntType(8), ir.IntType(64)
_ROW_BYTES = ir.Constant(_NUMBER, 64)


def call(builder: Any, name: str, *arguments: Any) -> None:
    """Emit a call to a void LLVM intrinsic."""
    function = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)


def bytes_at(context, builder, signature, arguments, array: int, offsets: list[Any]):
    """Emit a byte pointer to the element with the index `sum(offsets)` of an array.

    `array` is the index of the array in the arguments of the intrinsic.
    """
    data = context.make_array(signature.args[array])(context, builder, arguments[array]).data
    at = offsets[0]
    for offset in offsets[1:]:
        at = builder.add(at, offset)
    return builder.bitcast(builder.gep(data, [at]), _BYTE.as_pointer())


@simd_intrinsic
def ldtilecfg(typing, shapes):
    """Configure the tile registers. `shapes` is an array with the 64 bytes that LDTILECFG reads."""

    def code(context, builder, signature, arguments):
        zero = ir.Constant(_NUMBER, 0)
        pointer = bytes_at(context, builder, signature, arguments, 0, [zero])
        call(builder, "llvm.x86.ldtilecfg", pointer)
        return context.get_dummy_value()

    return types.void(shapes), code


@simd_intrinsic
def tilerelease(typing):
    """Release the tile registers; otherwise every context switch saves 8 KiB of tile state."""

    def code(context, builder, signature, arguments):
        call(builder, "llvm.x86.tilerelease")
        return context.get_dummy_value()

    return types.void(), code


def load_accumulators(num_rows: int, num_columns: int):
    """Return an intrinsic that sets every row of the accumulators to the values `columns[at:]`.

    The accumulators form a grid of `num_rows` by `num_columns` tiles, at most 4 in total.
    """

    @simd_intrinsic
    def start(typing, columns, at):
        def code(context, builder, signature, arguments):
            every_row = ir.Constant(_NUMBER, 0)
            for register in range(num_rows * num_columns):
                pointer = [arguments[1], ir.Constant(_NUMBER, register % num_columns * 16)]
                pointer = bytes_at(context, builder, signature, arguments, 0, pointer)
                number = ir.Constant(_BYTE, register)
                call(builder, "llvm.x86.tileloadd64", number, pointer, every_row)
            return context.get_dummy_value()

        return types.void(columns, types.intp), code

    return start


def store_accumulators(num_rows: int, num_columns: int):
    """Return an intrinsic that stores the accumulators to `y[at:]`.

    The accumulators form a grid of `num_rows` by `num_columns` tiles, at most 4 in total. In `y`, a
    row begins `width` words after the row before it.
    """

    @simd_intrinsic
    def store(typing, y, at, width):
        def code(context, builder, signature, arguments):
            _, at, width = arguments
            row_bytes = builder.mul(width, ir.Constant(_NUMBER, 4))
            for register in range(num_rows * num_columns):
                row, column = divmod(register, num_columns)
                pointer = bytes_at(
                    context, builder, signature, arguments, 0,
                    [at, builder.mul(width, ir.Constant(_NUMBER, row * ROWS)),
                     ir.Constant(_NUMBER, column * 16)],
                )  # fmt: skip
                number = ir.Constant(_BYTE, register)
                call(builder, "llvm.x86.tilestored64", number, pointer, row_bytes)
            return context.get_dummy_value()

        return types.void(y, types.intp, types.intp), code

    return store


def emit_bf16x3(builder, a, b):
    """Emit the work of `split_bf16x3`. The result is a list of three vectors of 32-bit words."""
    words = ir.VectorType(ir.IntType(32), a.type.count)
    upper, half = (ir.Constant(words, [each] * words.count) for each in (0xFFFF0000, 16))
    floats, splits = a.type, []
    for index in range(NUM_SPLITS):
        low, high = builder.bitcast(a, words), builder.bitcast(b, words)
        kept = builder.and_(high, upper)
        splits.append(builder.or_(builder.lshr(low, half), kept))
        if index + 1 < NUM_SPLITS:
            a = builder.fsub(a, builder.bitcast(builder.and_(low, upper), floats))
            b = builder.fsub(b, builder.bitcast(kept, floats))
    return splits


@simd_intrinsic
def split_bf16x3(typing, a, b):
    """Split each float32 of two vectors into three bfloat16 parts whose sum is the float32.

    The result is three vectors, one per part. Each 32-bit word of a vector has a part of `a` in its
    lower half and a part of `b` in its upper half. The first part of a value is the value's upper
    16 bits. The rest (value minus first part) is split in the same way.
    """

    def code(context, builder, signature, arguments):
        floats = arguments[0].type
        splits = [builder.bitcast(each, floats) for each in emit_bf16x3(builder, *arguments)]
        return context.make_tuple(builder, signature.return_type, splits)

    return types.UniTuple(F32Vec(VECTOR_WIDTH), NUM_SPLITS)(a, b), code


def emit_tile_ops(work: Sequence[Load | Multiply]):
    """Return an intrinsic that executes `work` on row tiles in `a` and column tiles in `b`.

    The three bfloat16 parts of a tile are contiguous. Row tiles are `row_step` words apart, and
    column tiles are NUM_SPLITS * TILE words apart.
    """

    @simd_intrinsic
    def step(typing, a, a_at, row_step, b, b_at):
        def code(context, builder, signature, arguments):
            _, a_at, row_step, _, b_at = arguments
            column_step = ir.Constant(_NUMBER, NUM_SPLITS * TILE)
            for each in work:
                if isinstance(each, Multiply):
                    registers = (ir.Constant(_BYTE, register) for register in each)
                    call(builder, "llvm.x86.tdpbf16ps", *registers)
                    continue
                start, apart = (a_at, row_step) if each.of_rows else (b_at, column_step)
                pointer = bytes_at(
                    context, builder, signature, arguments, 0 if each.of_rows else 3,
                    [start, builder.mul(apart, ir.Constant(_NUMBER, each.number)),
                     ir.Constant(_NUMBER, each.split * TILE)],
                )  # fmt: skip
                number = ir.Constant(_BYTE, each.register)
                call(builder, "llvm.x86.tileloadd64", number, pointer, _ROW_BYTES)
            return context.get_dummy_value()

        return types.void(a, types.intp, types.intp, b, types.intp), code

    return step
