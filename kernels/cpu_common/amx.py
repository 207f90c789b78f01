"""The matrix unit of a CPU (AMX), for loops that numba compiles: C += A B of whole tiles.

A tile register holds 16 rows of 64 bytes. A [16, 32] and B [32, 16] are of bfloat16, C [16, 16] of
float32. Of B two rows lie side by side, element by element: a word of 32 bits has what is to be
multiplied with a word of A. Each row of C depends on its row of A alone, and is summed in one order
(Intel's manual of instructions, TDPBF16PS): the bits do not depend on the other rows.

Registers 0 to 3 hold sums, 4 to 7 what is multiplied. All places are in arrays of float32, whose
tiles should begin where a line of the cache does: a load that does not takes twice as long.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from penstock.kernels.cpu_common.amx_schedule import NUM_SPLITS, Load, Multiply
from penstock.kernels.cpu_common.simd import VECTOR_WIDTH, F32Vec, simd_intrinsic

ROWS = 16  # of a tile
TILE = ROWS * 16  # float32, or words
TILE_K = 32  # inputs of a tile

_BYTE, _NUMBER = ir.IntType(8), ir.IntType(64)
_ROW_BYTES = ir.Constant(_NUMBER, 64)


def call(builder: Any, name: str, *arguments: Any) -> None:
    """Of an instruction of LLVM's that gives nothing."""
    function = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, function, name), arguments)


def bytes_at(context, builder, signature, arguments, array: int, offsets: list[Any]):
    """Where the element at the sum of the places is, of the array that is this argument."""
    data = context.make_array(signature.args[array])(context, builder, arguments[array]).data
    at = offsets[0]
    for offset in offsets[1:]:
        at = builder.add(at, offset)
    return builder.bitcast(builder.gep(data, [at]), _BYTE.as_pointer())


@simd_intrinsic
def ldtilecfg(typing, shapes):
    """From here on registers have these shapes: 64 bytes as LDTILECFG takes them."""

    def code(context, builder, signature, arguments):
        zero = ir.Constant(_NUMBER, 0)
        pointer = bytes_at(context, builder, signature, arguments, 0, [zero])
        call(builder, "llvm.x86.ldtilecfg", pointer)
        return context.get_dummy_value()

    return types.void(shapes), code


@simd_intrinsic
def tilerelease(typing):
    """Or every switch of threads would save them."""

    def code(context, builder, signature, arguments):
        call(builder, "llvm.x86.tilerelease")
        return context.get_dummy_value()

    return types.void(), code


def load_accumulators(num_rows: int, num_columns: int):
    """Registers 0 to 3, of so many tiles of rows and of columns, to numbers of each column."""

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
    """Registers 0 to 3, of so many tiles of rows and of columns, into y, whose rows are `width`
    numbers apart."""

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


@simd_intrinsic
def split_bf16x3(typing, a, b):
    """Words of the three parts of two vectors: of a in the lower halves, of b in the upper.

    A part is a number without its last 16 bits, the next one that of what is left: a is their sum.
    """

    def code(context, builder, signature, arguments):
        floats, words = arguments[0].type, ir.VectorType(ir.IntType(32), VECTOR_WIDTH)
        upper, half = (ir.Constant(words, [each] * VECTOR_WIDTH) for each in (0xFFFF0000, 16))
        a, b = arguments
        splits = []
        for index in range(NUM_SPLITS):
            low, high = builder.bitcast(a, words), builder.bitcast(b, words)
            kept = builder.and_(high, upper)
            splits.append(builder.bitcast(builder.or_(builder.lshr(low, half), kept), floats))
            if index + 1 < NUM_SPLITS:
                a = builder.fsub(a, builder.bitcast(builder.and_(low, upper), floats))
                b = builder.fsub(b, builder.bitcast(kept, floats))
        return context.make_tuple(builder, signature.return_type, splits)

    return types.UniTuple(F32Vec(VECTOR_WIDTH), NUM_SPLITS)(a, b), code


def emit_tile_ops(work: Sequence[Load | Multiply]):
    """Compiled code that does it: of tiles of rows in `a`, and of columns in `b`.

    Parts of a tile lie one after another; tiles of rows `row_step` apart, those of columns too.
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
