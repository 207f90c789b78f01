"""Conversion of codes (quantized weights) to float32 in vector registers, for numba intrinsics."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from penstock.kernels.cpu_common.emit import FLOATS, HALF_WORD, LANES, WORD, WORDS, filled
from penstock.kernels.linear.code_kinds import FP8, INT4, INT8
from penstock.kernels.linear.panels import PANEL


@dataclass(frozen=True, slots=True)
class Packing:
    """The layout of codes in memory.

    A unit is an integer of 2 or 4 bytes that contains one output's codes for successive inputs.
    """

    bits: int  # bits per code
    unit: ir.IntType
    units: int  # number of units in a step of `multiply_group`

    @property
    def inputs(self) -> int:
        """Return the number of inputs whose codes are in one unit."""
        return int(self.unit.width) // self.bits

    @property
    def row_bytes(self) -> int:
        """Return the size in bytes of the units of all outputs of a panel for the same inputs."""
        return PANEL * int(self.unit.width) // 8


def packing_of(kind: int) -> Packing:
    if kind == FP8:
        return Packing(8, HALF_WORD, 2)
    return Packing(8 if kind == INT8 else 4, WORD, 1)


def code_value(builder, kind: int, word, position: int, zeros: dict[int, Any], table):
    """Emit the unscaled float32 value of one code of each unit: the code with index `position`.

    This is the code minus its zero point, the value in a table, or (for FP8) the value / 2^8.
    """
    if kind == FP8:
        return _e4m3(builder, word, position)
    bits = packing_of(kind).bits
    # For kinds with a table, the code is not masked: the permutation instruction reads only the
    # lower four bits of each index.
    if kind not in (INT4, INT8):
        shifted = builder.lshr(word, filled(WORDS, bits * position)) if position else word
        return _permuted(builder, table, shifted)
    # The code becomes the low mantissa bits of a power of two large enough to hold it exactly.
    at = bits * position
    if at >= 16:
        word, at = builder.lshr(word, filled(WORDS, 16)), at - 16
    code = builder.and_(word, filled(WORDS, ((1 << bits) - 1) << at))
    return builder.fsub(_with_power(builder, code, at), zeros[at])


def _with_power(builder, code, at: int):
    """Emit the float32 2^(23 - at) + code, for a code that begins at bit `at` of a word."""
    power = filled(WORDS, (127 + 23 - at) << 23)
    return builder.bitcast(builder.or_(code, power), FLOATS)


def _e4m3(builder, word, position: int):
    """Emit the conversion of an e4m3 number to float32, divided by 2^8.

    The number is the lower byte (`position` 0) or the upper byte of 16 bits. With one more bit of
    exponent, the bits of an e4m3 number are a float16 number that is 2^8 times smaller. This is
    exact for subnormal numbers, too. NaN is not supported.
    """
    halves = ir.VectorType(HALF_WORD, LANES)
    if position == 0:
        word = builder.shl(word, filled(halves, 8))
    # The sign stays in bit 15, the other bits move to bits 13 to 7, and bit 14 is cleared.
    moved = builder.and_(builder.ashr(word, filled(halves, 1)), filled(halves, 0xBF80))
    return builder.fpext(builder.bitcast(moved, ir.VectorType(ir.HalfType(), LANES)), FLOATS)


def _permuted(builder, table: list[Any], indices):
    """Emit a lookup of each index (lower four bits) in a table of 16 floats.

    The instruction reads only the lower four bits of an index (AVX-512), or the lower three (AVX2).
    With AVX2, bit 3 of an index selects the half of the table.
    """
    if len(table) == 1:
        kind = ir.FunctionType(FLOATS, [FLOATS, WORDS])
        name = "llvm.x86.avx512.permvar.sf.512"
        function = cgutils.get_or_insert_function(builder.module, kind, name)
        return builder.call(function, [table[0], indices])
    kind = ir.FunctionType(FLOATS, [FLOATS, WORDS])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.permps")
    lower, upper = (builder.call(function, [half, indices]) for half in table)
    bit = builder.shl(indices, filled(WORDS, 28))
    is_upper = builder.icmp_signed("<", bit, filled(WORDS, 0))
    return builder.select(is_upper, upper, lower)
