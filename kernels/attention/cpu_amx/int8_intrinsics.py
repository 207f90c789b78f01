"""Numba intrinsics of attention with AMX over an INT8 cache, see `cpu_amx/int8`.

Arrays of float32 also contain int32 sums and tiles of int8. Indices count elements.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from penstock.kernels.attention.cpu_amx.intrinsics import (
    number_of,
    shuffle,
    splat,
    transposes,
    vector_at,
)
from penstock.kernels.cpu_common.amx import TILE
from penstock.kernels.cpu_common.amx_schedule import NUM_SPLITS
from penstock.kernels.cpu_common.simd import VECTOR_WIDTH, F32Vec, simd_intrinsic

_WORD = ir.IntType(32)
_FLOATS, _WORDS, _HALVES = (
    ir.VectorType(kind, 16) for kind in (ir.FloatType(), _WORD, ir.HalfType())
)
_BYTES = ir.VectorType(ir.IntType(8), 64)
_DIGIT_VALUES = (65536.0, 256.0, 1.0)


def _constant(kind: Any, value: float):
    return ir.Constant(kind, [value] * kind.count)


def _emit_round(builder, floats):
    """Emit the conversion to int32, to nearest. NaN becomes a finite number."""
    function = ir.FunctionType(_WORDS, [_FLOATS, _WORDS, ir.IntType(16), _WORD])
    name = "llvm.x86.avx512.mask.cvtps2dq.512"
    called = cgutils.get_or_insert_function(builder.module, function, name)
    every_lane, current_rounding = ir.Constant(ir.IntType(16), -1), ir.Constant(_WORD, 4)
    return builder.call(called, [floats, _constant(_WORDS, 0), every_lane, current_rounding])


def _emit_bytes(builder, one, other, first):
    """Emit a vector with byte `first` of each word of both vectors, then with the next byte."""
    lanes = [4 * word + first + step for step in range(2) for word in range(32)]
    return shuffle(builder, builder.bitcast(one, _BYTES), builder.bitcast(other, _BYTES), lanes)


def emit_from_digits(builder, digits):
    """Emit code that combines three vectors of int32 digits into one float32 vector."""
    found = None
    for digit, value in zip(digits, _DIGIT_VALUES, strict=True):
        added = builder.sitofp(builder.bitcast(digit, _WORDS), _FLOATS)
        added = builder.fmul(added, _constant(_FLOATS, value))
        found = added if found is None else builder.fadd(found, added)
    return found


@simd_intrinsic
def split_digits(typing, values, at, factor, splits, into, apart):
    """Round the 64 float32 `values[at:] * factor` and split them into three rows of int8 digits.

    A number is 65536 a + 256 b + c. Each digit is in [-128, 127]. The rows of a, b and c begin at
    `splits[into]`, `splits[into + apart]` and `splits[into + 2 * apart]`.
    """

    def code(context, builder, signature, arguments):
        _, at, factor, _, into, apart = arguments
        factors, words = splat(builder, factor), []
        for vector in range(4):
            offsets = [at, number_of(16 * vector)]
            pointer = vector_at(context, builder, signature, arguments, 0, offsets, _FLOATS)
            scaled = builder.fmul(builder.load(pointer, align=4), factors)
            # 128 is added to each digit, so that none is negative.
            words.append(builder.add(_emit_round(builder, scaled), _constant(_WORDS, 0x808080)))
        low = [_emit_bytes(builder, words[i], words[i + 1], 0) for i in (0, 2)]
        high = [_emit_bytes(builder, words[i], words[i + 1], 2) for i in (0, 2)]
        lower = [*range(32), *range(64, 96)]
        upper = [each + 32 for each in lower]
        for number, (pair, lanes) in enumerate(((high, lower), (low, upper), (low, lower))):
            digits = shuffle(builder, pair[0], pair[1], lanes)
            digits = builder.xor(digits, _constant(_BYTES, 0x80))
            offsets = [into, builder.mul(apart, number_of(number))]
            pointer = vector_at(context, builder, signature, arguments, 3, offsets, _BYTES)
            builder.store(digits, pointer, align=4)
        return context.get_dummy_value()

    return types.void(values, types.intp, types.float32, splits, types.intp, types.intp), code


transpose_digits = transposes(NUM_SPLITS, emit_from_digits)
"""Transpose a tile of float32. The three tiles at `tiles[at:]` are its digits."""


def _emit_load_digits(context, builder, signature, arguments, offsets):
    """Emit code that loads digits `offsets[-1]` elements apart and combines them.

    The first digits begin at the sum of the other offsets.
    """
    digits = []
    for number in range(NUM_SPLITS):
        own = [*offsets[:-1], builder.mul(offsets[-1], number_of(number))]
        pointer = vector_at(context, builder, signature, arguments, 0, own, _FLOATS)
        digits.append(builder.load(pointer, align=4))
    return emit_from_digits(builder, digits)


@simd_intrinsic
def load_digits(typing, sums, at, step):
    """Load 16 numbers as float32. Their digits begin at `sums[at + digit * step]`."""
    lanes = F32Vec(VECTOR_WIDTH)

    def code(context, builder, signature, arguments):
        return _emit_load_digits(context, builder, signature, arguments, list(arguments[1:]))

    return lanes(sums, types.intp, types.intp), code


@simd_intrinsic
def add_features(typing, sums, at, tile_step, digit_step, totals, into):
    """Add 64 features of a query row, in the order of `interleave_4`, to `totals[into:]`.

    The digits of the features of tile t begin at `sums[at + t * tile_step + digit * digit_step]`.
    """

    def code(context, builder, signature, arguments):
        _, at, tile_step, digit_step, _, into = arguments
        tiles = []
        for tile in range(4):
            offsets = [at, builder.mul(tile_step, number_of(tile)), digit_step]
            tiles.append(_emit_load_digits(context, builder, signature, arguments, offsets))
        for lane in range(4):
            fours = range(4 * lane, 4 * lane + 4)
            both = [*fours, *(16 + each for each in fours)]
            halves = [shuffle(builder, tiles[i], tiles[i + 1], both) for i in (0, 2)]
            found = shuffle(builder, halves[0], halves[1], range(16))
            offsets = [into, number_of(16 * lane)]
            pointer = vector_at(context, builder, signature, arguments, 4, offsets, _FLOATS)
            builder.store(builder.fadd(builder.load(pointer, align=4), found), pointer, align=4)
        return context.get_dummy_value()

    return types.void(sums, *[types.intp] * 3, totals, types.intp), code


@simd_intrinsic
def interleave_4(typing, values, at, row_bytes, tiles, into):
    """Interleave 64 int8 of four positions, and store them as a row of each of four tiles.

    The positions' values begin at `values[at + row_bytes * position]`, and the rows at
    `tiles[into + TILE * tile]`. A word has the values of a feature of the four positions. Words
    4 i to 4 i + 3 of tile t have the features 16 i + 4 t to 16 i + 4 t + 3, so that a row takes few
    instructions.
    """

    def code(context, builder, signature, arguments):
        _, at, row_bytes, _, into = arguments
        rows = []
        for position in range(4):
            offsets = [at, builder.mul(row_bytes, number_of(position))]
            pointer = vector_at(context, builder, signature, arguments, 0, offsets, _BYTES)
            rows.append(builder.load(pointer, align=1))
        pairs = ir.VectorType(ir.IntType(16), 32)
        for half in range(2):
            features = [16 * i + 8 * half + j for i in range(4) for j in range(8)]
            lanes = [each + side for each in features for side in (0, 64)]
            one, other = (
                builder.bitcast(shuffle(builder, rows[i], rows[i + 1], lanes), pairs)
                for i in (0, 2)
            )
            for quarter in range(2):
                words = [8 * i + 4 * quarter + j for i in range(4) for j in range(4)]
                lanes = [each + side for each in words for side in (0, 32)]
                offsets = [into, number_of((2 * half + quarter) * TILE)]
                pointer = vector_at(context, builder, signature, arguments, 3, offsets, pairs)
                builder.store(shuffle(builder, one, other, lanes), pointer, align=4)
        return context.get_dummy_value()

    return types.void(values, types.intp, types.intp, tiles, types.intp), code


@simd_intrinsic
def load_f16_as_f32(typing, rows, at):
    """Load 16 float16 from the bytes `rows[at:]`, converted to float32."""
    lanes = F32Vec(VECTOR_WIDTH)

    def code(context, builder, signature, arguments):
        pointer = vector_at(context, builder, signature, arguments, 0, [arguments[1]], _HALVES)
        return builder.fpext(builder.load(pointer, align=1), _FLOATS)

    return lanes(rows, types.intp), code
