"""Numba intrinsics of attention with AMX: single tile operations, and changes of layout.

See `cpu_common/amx` for tiles. Tiles in memory are in float32 arrays: an element has two bfloat16
or four int8. Keys and values are in the cache, a flat array of uint16 (bfloat16) or int8. Indices
count elements.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from typing import Any

from llvmlite import ir
from numba.core import types

from penstock.kernels.cpu_common.amx import TILE, bytes_at, call, emit_bf16x3
from penstock.kernels.cpu_common.amx_schedule import NUM_SPLITS
from penstock.kernels.cpu_common.simd import simd_intrinsic

_BYTE, _HALF, _WORD, _NUMBER = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOATS, _WORDS = ir.VectorType(ir.FloatType(), 16), ir.VectorType(_WORD, 16)
_HALVES = ir.VectorType(_HALF, 32)
_CONTIGUOUS = ir.Constant(_NUMBER, 64)


def _register(number: int):
    return ir.Constant(_BYTE, number)


def tile_zero(register: int):
    """Return an intrinsic that sets a tile register to zero."""

    @simd_intrinsic
    def zero(typing):
        def code(context, builder, signature, arguments):
            call(builder, "llvm.x86.tilezero", _register(register))
            return context.get_dummy_value()

        return types.void(), code

    return zero


def _transfer(register: int, name: str):
    @simd_intrinsic
    def transfer(typing, array, at):
        def code(context, builder, signature, arguments):
            pointer = bytes_at(context, builder, signature, arguments, 0, [arguments[1]])
            call(builder, name, _register(register), pointer, _CONTIGUOUS)
            return context.get_dummy_value()

        return types.void(array, types.intp), code

    return transfer


def tile_load(register: int):
    """Return an intrinsic that loads a contiguous tile from `array[at:]`."""
    return _transfer(register, "llvm.x86.tileloadd64")


def tile_store(register: int):
    """Return an intrinsic that stores a contiguous tile to `array[at:]`."""
    return _transfer(register, "llvm.x86.tilestored64")


def tile_load_rows(register: int):
    """Return an intrinsic that loads a tile whose rows begin `row_bytes` bytes apart."""

    @simd_intrinsic
    def load(typing, array, at, row_bytes):
        def code(context, builder, signature, arguments):
            pointer = bytes_at(context, builder, signature, arguments, 0, [arguments[1]])
            name = "llvm.x86.tileloadd64"
            call(builder, name, _register(register), pointer, arguments[2])
            return context.get_dummy_value()

        return types.void(array, types.intp, types.intp), code

    return load


def tile_multiply(sums: int, left: int, right: int):
    """Return an intrinsic that adds the product of two tiles to a tile of sums.

    Its argument is the flat cache. The operands are int8 and the sums int32 if the cache is INT8;
    otherwise, they are bfloat16 and float32.
    """

    @simd_intrinsic
    def multiply(typing, rows):
        name = "llvm.x86.tdpbssd" if rows.dtype == types.int8 else "llvm.x86.tdpbf16ps"

        def code(context, builder, signature, arguments):
            call(builder, name, *(_register(each) for each in (sums, left, right)))
            return context.get_dummy_value()

        return types.void(rows), code

    return multiply


def number_of(value: int):
    return ir.Constant(_NUMBER, value)


def vector_at(context, builder, signature, arguments, array, offsets, kind):
    """Return the address from `bytes_at` as a pointer to a vector of type `kind`."""
    pointer = bytes_at(context, builder, signature, arguments, array, offsets)
    return builder.bitcast(pointer, kind.as_pointer())


def shuffle(builder, one, other, lanes):
    mask = ir.Constant(ir.VectorType(_WORD, len(lanes)), list(lanes))
    return builder.shuffle_vector(one, other, mask)


def splat(builder, value):
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), value, ir.Constant(_WORD, 0))
    return shuffle(builder, one, one, [0] * 16)


@simd_intrinsic
def split_row(typing, values, at, factor, splits, into, apart):
    """Split the 32 float32 `values[at:] * factor` into three rows of 16 words.

    The rows begin at `splits[into]`, `splits[into + apart]` and `splits[into + 2 * apart]`. A word
    has two successive values.
    """

    def code(context, builder, signature, arguments):
        _, at, factor, _, into, apart = arguments
        factors = splat(builder, factor)

        def scaled(offset):
            offsets = [at, number_of(offset)]
            pointer = vector_at(context, builder, signature, arguments, 0, offsets, _FLOATS)
            return builder.fmul(builder.load(pointer, align=4), factors)

        first, second = scaled(0), scaled(16)
        low = shuffle(builder, first, second, range(0, 32, 2))
        high = shuffle(builder, first, second, range(1, 32, 2))
        for number, split in enumerate(emit_bf16x3(builder, low, high)):
            offsets = [into, builder.mul(apart, number_of(number))]
            pointer = vector_at(context, builder, signature, arguments, 3, offsets, _WORDS)
            builder.store(split, pointer, align=4)
        return context.get_dummy_value()

    return types.void(values, types.intp, types.float32, splits, types.intp, types.intp), code


@simd_intrinsic
def write_features(typing, sums, at, tile_step, split_step, factor, out, out_at):
    """Write 32 features of a query row to `out[out_at:]`: the sum of three splits times `factor`.

    The sums of the splits begin at `sums[at]`, `sums[at + split_step]` and
    `sums[at + 2 * split_step]` in the order of the first row of `interleave`, and `tile_step` words
    later in the order of the second row.
    """

    def code(context, builder, signature, arguments):
        _, at, tile_step, split_step, factor, _, out_at = arguments
        factors = splat(builder, factor)

        def load(row, split):
            offsets = [
                at,
                builder.mul(tile_step, number_of(row)),
                builder.mul(split_step, number_of(split)),
            ]
            pointer = vector_at(context, builder, signature, arguments, 0, offsets, _FLOATS)
            return builder.load(pointer, align=4)

        rows = []
        for row in range(2):
            summed = builder.fadd(builder.fadd(load(row, 0), load(row, 1)), load(row, 2))
            rows.append(builder.fmul(summed, factors))
        for half in range(2):
            words = [
                8 * half + 4 * i + 16 * row + j
                for i in range(2)
                for row in range(2)
                for j in range(4)
            ]
            offsets = [out_at, number_of(16 * half)]
            pointer = vector_at(context, builder, signature, arguments, 5, offsets, _FLOATS)
            builder.store(shuffle(builder, rows[0], rows[1], words), pointer, align=4)
        return context.get_dummy_value()

    integers = [types.intp] * 3
    return types.void(sums, *integers, types.float32, out, types.intp), code


@simd_intrinsic
def interleave(typing, values, first, second, tiles, into):
    """Interleave 32 bfloat16 of two positions, and store them as two rows of 16 words.

    The positions' values begin at `values[first]` and `values[second]`, and the rows at
    `tiles[into]` and `tiles[into + TILE]`. A word has the value of the first position in its lower
    half. Words 4 i to 4 i + 3 of the first row have the features 8 i to 8 i + 3, and those of the
    second row the features 8 i + 4 to 8 i + 7, so that each row takes one instruction.
    """

    def code(context, builder, signature, arguments):
        one, other = (
            builder.load(
                vector_at(context, builder, signature, arguments, 0, [arguments[each]], _HALVES),
                align=2,
            )
            for each in (1, 2)
        )
        for row in range(2):
            features = [8 * i + 4 * row + j for i in range(4) for j in range(4)]
            lanes = [each + side for each in features for side in (0, 32)]
            offsets = [arguments[4], number_of(row * TILE)]
            pointer = vector_at(context, builder, signature, arguments, 3, offsets, _HALVES)
            builder.store(shuffle(builder, one, other, lanes), pointer, align=4)
        return context.get_dummy_value()

    return types.void(values, types.intp, types.intp, tiles, types.intp), code


def emit_transpose(builder, rows):
    """Emit the transpose of 16 vectors of 16 words. The result is a list of vectors."""
    # Each round interleaves the first eight rows with the last eight. Four rounds
    # transpose the tile.
    halves = [[j for i in range(h, h + 8) for j in (i, i + 16)] for h in (0, 8)]
    for _ in range(4):
        rows = [shuffle(builder, rows[i], rows[i + 8], lanes) for i in range(8) for lanes in halves]
    return rows


def transposes(num_tiles: int, emit_row: Any):
    """Return an intrinsic that combines tiles into one of 16 x 16 words and transposes it.

    The `num_tiles` contiguous tiles begin at `tiles[at]`. Row r of the result begins at
    `out[out_at + r * width]`.

    Args:
        num_tiles: number of tiles.
        emit_row: called with the builder and the vectors of the same row of all tiles, as float32.
            It emits the vector that takes their place.
    """

    @simd_intrinsic
    def transpose(typing, tiles, at, out, out_at, width):
        def code(context, builder, signature, arguments):
            _, at, _, out_at, width = arguments

            def load(tile, number):
                offsets = [at, number_of(tile * TILE + 16 * number)]
                pointer = vector_at(context, builder, signature, arguments, 0, offsets, _FLOATS)
                return builder.load(pointer, align=4)

            rows = [
                emit_row(builder, [load(tile, number) for tile in range(num_tiles)])
                for number in range(16)
            ]
            for number, found in enumerate(emit_transpose(builder, rows)):
                offsets = [out_at, builder.mul(width, number_of(number))]
                pointer = vector_at(context, builder, signature, arguments, 2, offsets, _FLOATS)
                builder.store(found, pointer, align=4)
            return context.get_dummy_value()

        return types.void(tiles, types.intp, out, types.intp, types.intp), code

    return transpose


def _emit_sum(builder, vectors):
    found = vectors[0]
    for vector in vectors[1:]:
        found = builder.fadd(found, vector)
    return found


transpose, transpose_sum = transposes(1, _emit_sum), transposes(NUM_SPLITS, _emit_sum)
"""Transpose the tile at `tiles[at:]`, or (`transpose_sum`) the sum of the three float32 tiles."""


def _reduction(combine: Any):
    @simd_intrinsic
    def reduce(typing, lanes):
        def code(context, builder, signature, arguments):
            lanes, count = arguments[0], 16
            while count > 1:
                count //= 2
                lower = shuffle(builder, lanes, lanes, range(count))
                upper = shuffle(builder, lanes, lanes, range(count, 2 * count))
                lanes = combine(builder, lower, upper)
            return builder.extract_element(lanes, ir.Constant(_WORD, 0))

        return types.float32(lanes), code

    return reduce


def _emit_max(builder, one, other):
    return builder.select(builder.fcmp_ordered(">", one, other), one, other)


sum_lanes = _reduction(lambda builder, one, other: builder.fadd(one, other))
max_lanes = _reduction(_emit_max)
"""Sum or maximum of the 16 lanes of a vector: the upper half is combined with the lower half until
one lane is left."""
