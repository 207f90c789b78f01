"""Numba intrinsics that load VECTOR_WIDTH codes of 4 or 8 bits as float32 vectors."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

import math
from typing import Any

from llvmlite import ir
from numba.core import types

from penstock.kernels.cpu_common.simd import VECTOR_WIDTH, F32Vec, simd_intrinsic

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


@simd_intrinsic
def load_e4m3(typing, codes, at):
    """Load FP8 numbers (e4m3: sign, 4 bits of exponent with bias 7, 3 of mantissa, no infinity)."""

    def code(context, builder, signature, arguments):
        found = _load_bytes(context, builder, signature, arguments)
        rest = builder.and_(found, _all(0x7F))
        # The exponents' biases differ by 120. Subnormal numbers are multiples of 2^-9.
        moved = builder.add(builder.shl(rest, _all(20)), _all(120 << 23))
        unit = ir.Constant(_FLOATS, [2.0**-9] * VECTOR_WIDTH)
        nan = ir.Constant(_FLOATS, [math.nan] * VECTOR_WIDTH)
        small = builder.fmul(builder.uitofp(rest, _FLOATS), unit)
        value = builder.select(
            builder.icmp_unsigned("<", rest, _all(8)), small, builder.bitcast(moved, _FLOATS)
        )
        value = builder.select(builder.icmp_unsigned("==", rest, _all(0x7F)), nan, value)
        sign = builder.shl(builder.and_(found, _all(0x80)), _all(24))
        return builder.bitcast(builder.or_(builder.bitcast(value, _WIDE), sign), _FLOATS)

    return F32Vec(VECTOR_WIDTH)(codes, types.intp), code


@simd_intrinsic
def vsub(typing, a, b):
    """Compute a - b per lane."""

    def code(context, builder, signature, arguments):
        return builder.fsub(*arguments)

    return a(a, a), code
