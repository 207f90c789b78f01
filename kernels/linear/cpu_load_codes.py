"""Numba intrinsics that load VECTOR_WIDTH codes of 4 or 8 bits as float32 vectors."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types

from penstock.kernels.cpu_common.simd import VECTOR_WIDTH, F32Vec, simd_intrinsic
from penstock.kernels.linear.code_tables import E2M1, FP4, NF4

_WIDE = ir.VectorType(ir.IntType(32), VECTOR_WIDTH)
_FLOATS = ir.VectorType(ir.FloatType(), VECTOR_WIDTH)


def _all(value: int) -> Any:
    return ir.Constant(_WIDE, [value] * VECTOR_WIDTH)


def _load_bytes(context, builder, signature, arguments):
    """Emit a load of VECTOR_WIDTH bytes, starting at element `arguments[1]`, as int32."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    narrow = ir.VectorType(ir.IntType(8), VECTOR_WIDTH)
    pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), narrow.as_pointer())
    return builder.zext(builder.load(pointer, align=1), _WIDE)


def _integers(shift: int, mask: int):
    @simd_intrinsic
    def load(typing, codes, at):
        """Load the unsigned integers in some bits of the bytes `codes[at:]`."""

        def code(context, builder, signature, arguments):
            found = _load_bytes(context, builder, signature, arguments)
            shifted = builder.lshr(found, _all(shift)) if shift else found
            return builder.uitofp(builder.and_(shifted, _all(mask)), _FLOATS)

        return F32Vec(VECTOR_WIDTH)(codes, types.intp), code

    return load


load_u8, load_low_bits, load_high_bits = _integers(0, 255), _integers(0, 15), _integers(4, 15)
"""Loads of whole bytes, and of bits 0 to 3 or 4 to 7 of each byte."""


def _permuted(builder, indices, values: tuple[float, ...]):
    """Emit the selection of `values` by int32 indices: one permutation of a register."""
    count = len(values)
    wide, floats = (ir.VectorType(each, count) for each in (ir.IntType(32), ir.FloatType()))
    name = {16: "llvm.x86.avx512.permvar.sf.512", 8: "llvm.x86.avx2.permps"}[count]
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(floats, [floats, wide]), name
    )
    return builder.call(function, [ir.Constant(floats, list(values)), indices])


def _select(builder, indices, table: tuple[float, ...]):
    """Emit a look-up of each index in a table of 16 floats.

    A vector of 8 lanes holds half of the table, so both halves are permuted and then merged.
    """
    if len(table) == VECTOR_WIDTH:
        return _permuted(builder, indices, table)
    low, high = (_permuted(builder, indices, half) for half in (table[:8], table[8:]))
    return builder.select(builder.icmp_unsigned("<", indices, _all(8)), low, high)


def _table_values(shift: int, table: tuple[float, ...]):
    # On x86 only, like all loops of `cpu_dequantizing`.
    table = tuple(float(np.float32(value)) for value in table)

    @simd_intrinsic
    def load(typing, codes, at):
        """Load the values of the codes in some bits of the bytes `codes[at:]`."""

        def code(context, builder, signature, arguments):
            found = _load_bytes(context, builder, signature, arguments)
            shifted = builder.lshr(found, _all(shift)) if shift else found
            return _select(builder, builder.and_(shifted, _all(15)), table)

        return F32Vec(VECTOR_WIDTH)(codes, types.intp), code

    return load


load_low_e2m1, load_high_e2m1 = _table_values(0, E2M1), _table_values(4, E2M1)
load_low_nf4, load_high_nf4 = _table_values(0, NF4), _table_values(4, NF4)
load_low_fp4, load_high_fp4 = _table_values(0, FP4), _table_values(4, FP4)
"""Loads of the values of codes in bits 0 to 3 or 4 to 7 of each byte; see `code_tables`."""


@simd_intrinsic
def load_e4m3(typing, codes, at):
    """Load FP8 numbers (e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa, no infinity).

    The bits of an e4m3 number, with one more bit of exponent, are a float16 number that is 2^8
    times smaller. Subnormal numbers are exact too. Only NaN, all ones, needs care.
    """

    def code(context, builder, signature, arguments):
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        narrow, half = (ir.VectorType(ir.IntType(size), VECTOR_WIDTH) for size in (8, 16))
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), narrow.as_pointer())
        found = builder.zext(builder.load(pointer, align=1), half)

        def every(value: int) -> Any:
            return ir.Constant(half, [value] * VECTOR_WIDTH)

        # The sign goes to bit 15, the other bits to 13 to 7; bit 14 is cleared.
        moved = builder.ashr(builder.shl(found, every(8)), every(1))
        moved = builder.and_(moved, every(0xBFFF))
        floats = ir.VectorType(ir.HalfType(), VECTOR_WIDTH)
        wide = builder.fpext(builder.bitcast(moved, floats), _FLOATS)
        factor = ir.Constant(_FLOATS, [2.0**8] * VECTOR_WIDTH)
        is_nan = builder.icmp_unsigned("==", builder.and_(found, every(0x7F)), every(0x7F))
        nan = ir.Constant(_FLOATS, [math.nan] * VECTOR_WIDTH)
        return builder.select(is_nan, nan, builder.fmul(wide, factor))

    return F32Vec(VECTOR_WIDTH)(codes, types.intp), code


@simd_intrinsic
def vsub(typing, a, b):
    """Compute a - b per lane."""

    def code(context, builder, signature, arguments):
        return builder.fsub(*arguments)

    return a(a, a), code
