"""Functions that emit LLVM code on full-width vectors, for numba intrinsics."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from penstock.kernels.cpu_common.simd import VECTOR_WIDTH

LANES = VECTOR_WIDTH

BYTE, HALF_WORD, WORD, INDEX = (ir.IntType(bits) for bits in (8, 16, 32, 64))
WORDS, FLOATS = ir.VectorType(WORD, LANES), ir.VectorType(ir.FloatType(), LANES)


def constant(value: int) -> Any:
    """Return an LLVM constant of the integer type of array indices."""
    return ir.Constant(INDEX, value)


def filled(vector, value: float) -> Any:
    """Return an LLVM constant of the type `vector`, with the same value in all lanes."""
    return ir.Constant(vector, [value] * LANES)


def broadcast(builder, value):
    """Emit a vector with a scalar in all lanes."""
    vector = ir.VectorType(value.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(WORD, 0))
    mask = ir.Constant(WORDS, [0] * LANES)
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), mask)


def vector_at(builder, data, at, vector):
    """Emit a pointer to the vector that begins at element `at` of an array."""
    return builder.bitcast(builder.gep(data, [at]), vector.as_pointer())


def load_vector(builder, data, at, vector, align: int):
    """Emit a load of the vector that begins at element `at` of an array."""
    return builder.load(vector_at(builder, data, at, vector), align=align)


def prefetch_pointer(builder, pointer) -> None:
    """Emit a prefetch into the L2 cache, for reading; the same operation as `simd.prefetch`."""
    byte = BYTE.as_pointer()
    function = ir.FunctionType(ir.VoidType(), [byte, WORD, WORD, WORD])
    called = cgutils.get_or_insert_function(builder.module, function, "llvm.prefetch.p0")
    how = [ir.Constant(WORD, value) for value in (0, 2, 1)]
    builder.call(called, [builder.bitcast(pointer, byte), *how])


def fma(builder, a, b, c):
    """Emit `a * b + c` of float vectors, rounded once."""
    function = ir.FunctionType(FLOATS, [FLOATS] * 3)
    called = cgutils.get_or_insert_function(builder.module, function, f"llvm.fma.v{LANES}f32")
    return builder.call(called, [a, b, c])


def array_data(context, builder, signature, arguments) -> list[Any]:
    """Return the arguments of an intrinsic; an array is replaced by a pointer to its data."""
    return [
        context.make_array(kind)(context, builder, value).data
        if isinstance(kind, types.Array)
        else value
        for kind, value in zip(signature.args, arguments, strict=True)
    ]


def row_pointers(builder, data, at, step, count, num_rows: int) -> list[Any]:
    """Emit pointers to `num_rows` rows of an array that has only `count` rows.

    Pointers to rows past the last one point to the last row.

    Args:
        at: index of the first element of the first row.
        step: number of elements from a row to the next.
        count: number of rows that the array has, at least 1.
    """
    last = builder.sub(count, constant(1))
    pointers = []
    for row in range(num_rows):
        exists = builder.icmp_signed("<", constant(row), count)
        number = builder.select(exists, constant(row), last)
        pointers.append(builder.gep(data, [builder.add(at, builder.mul(number, step))]))
    return pointers


def by_row_count(
    builder, count, sizes: tuple[int, ...], emit: Callable[[int], None], index: int = 0
) -> None:
    """Emit branches that choose, at run time, the smallest of `sizes[index:]` that is >= `count`.

    `emit(size)` emits the code of one branch. `sizes` are in ascending order, and `count` must not
    exceed the last of them.
    """
    num_rows = sizes[index]
    if index == len(sizes) - 1:
        emit(num_rows)
        return
    fits = builder.icmp_signed("<=", count, constant(num_rows))
    with builder.if_else(fits) as (then, otherwise):
        with then:
            emit(num_rows)
        with otherwise:
            by_row_count(builder, count, sizes, emit, index + 1)
