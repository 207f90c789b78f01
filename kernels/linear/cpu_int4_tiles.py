"""Numba intrinsic that multiplies rows of 8-bit integers by 4-bit codes.

It uses AVX-512 VNNI, or AVX2 on CPUs without AVX-512. The integer sums are exact, so both give the
same sums.

Codes become bytes in registers, and each vector of bytes is multiplied by all rows of the tile.
`cpu_packed_int4` describes the formula and the order of summation.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from penstock.kernels.cpu_common.emit import (
    BYTE,
    FLOATS,
    HALF_WORD,
    INDEX,
    LANES,
    WORD,
    WORDS,
    array_data,
    broadcast,
    by_row_count,
    constant,
    filled,
    fma,
    load_vector,
    prefetch_pointer,
    row_pointers,
    vector_at,
)
from penstock.kernels.cpu_common.simd import simd_intrinsic
from penstock.kernels.linear.cpu_code_tiles import ROW_COUNTS
from penstock.kernels.linear.int8_blocks import BLOCK_INPUTS, UNIT_INPUTS
from penstock.kernels.linear.panels import PANEL

_COLUMNS = range(0, PANEL, LANES)
_UNIT_BYTES = 4 * PANEL

_SHORT_RUN = 32
"""Number of inputs whose products fit in sums of 16 bits: each sum gets 16 products of a code (at
most 15) and an activation (at most 127 in magnitude)."""


@dataclass(frozen=True, slots=True)
class _Tile:
    """The arguments of `multiply_block`; arrays are replaced by pointers to their data."""

    is_expanded: bool
    qvalues: Any
    q_at: Any
    q_step: Any
    row_scales: Any
    row_scales_at: Any
    row_scales_step: Any
    offsets: Any
    offsets_at: Any
    offsets_step: Any
    count: Any
    num_inputs: Any
    run: Any
    codes: Any
    codes_at: Any
    scales: Any
    zeros: Any
    group_at: Any
    group_step: Any
    y: Any
    y_at: Any
    y_step: Any


def multiply_block(is_expanded: bool):
    """Return an intrinsic that multiplies a tile of rows by one block of inputs of a panel.

    Args:
        is_expanded: whether the codes are bytes that `expand_codes` has made. For such codes, only
            one loop is compiled, for the largest number of rows; tiles with fewer rows use it too.
    """
    sizes = ROW_COUNTS[-1:] if is_expanded else ROW_COUNTS

    @simd_intrinsic
    def multiply(
        typing, qvalues, q_at, q_step, row_scales, row_scales_at, row_scales_step, offsets,
        offsets_at, offsets_step, count, num_inputs, run, codes, codes_at, scales, zeros, group_at,
        group_step, y, y_at, y_step,
    ):  # fmt: skip
        """Add the products of one block of inputs to a panel of `count` rows of y.

        For each array, the argument with the suffix `_at` is the index of the first element, and
        the argument with the suffix `_step` is the number of elements from a row to the next.

        Args:
            qvalues: int8 activations of the block.
            row_scales: float32; one scale per row for the activations of the block.
            offsets: int32; for each run of a row, minus the sum of the run's activations.
            count: number of rows, 1 to the last of ROW_COUNTS.
            num_inputs: number of inputs in the block, a multiple of UNIT_INPUTS, at most
                BLOCK_INPUTS.
            run: number of inputs per run, a multiple of UNIT_INPUTS. A run's inputs have one group.
            codes: uint8 codes of the panel; those of the block begin at index `codes_at`.
            scales: float32; the PANEL scales of the first run's group begin at index `group_at`.
            zeros: uint8 zero points, with the same indices as `scales`.
            group_step: number of elements from the group of a run to the group of the next run.
            y: float32.
        """
        size = types.intp
        result = types.void(
            qvalues, size, size, row_scales, size, size, offsets, size, size, size, size, size,
            codes, size, scales, zeros, size, size, y, size, size,
        )  # fmt: skip

        def code(context, builder, signature, arguments):
            tile = _Tile(is_expanded, *array_data(context, builder, signature, arguments))
            by_row_count(
                builder, tile.count, sizes, lambda num_rows: _emit(builder, num_rows, tile)
            )
            return context.get_dummy_value()

        return result, code

    return multiply


@simd_intrinsic
def expand_codes(typing, codes, codes_at, num_inputs, expanded):
    """Store the codes of one block of inputs of a panel as bytes.

    Args:
        codes: uint8 codes of the panel; those of the block begin at index `codes_at`.
        num_inputs: number of inputs in the block, a multiple of UNIT_INPUTS.
        expanded: uint8 result: for each unit of inputs, two sets of vectors (see `_unpack`).
    """
    size = types.intp
    result = types.void(codes, size, size, expanded)

    def code(context, builder, signature, arguments):
        packed, at, count, target = array_data(context, builder, signature, arguments)
        with cgutils.for_range_slice(
            builder, constant(0), count, constant(UNIT_INPUTS), intp=INDEX
        ) as (k, number):
            first = builder.mul(number, constant(2 * _UNIT_BYTES))
            for position, columns in enumerate(_unpack(builder, packed, at, k)):
                for c, column in zip(_COLUMNS, columns, strict=True):
                    index = builder.add(first, constant(position * _UNIT_BYTES + 4 * c))
                    builder.store(column, vector_at(builder, target, index, WORDS), align=1)
        return context.get_dummy_value()

    return result, code


def _emit(builder, num_rows: int, tile: _Tile) -> None:
    """Emit the code of `multiply_block` for at most `num_rows` rows; `tile.count` rows exist."""
    qvalues, offsets, row_scales = (
        row_pointers(builder, data, at, step, tile.count, num_rows)
        for data, at, step in (
            (tile.qvalues, tile.q_at, tile.q_step),
            (tile.offsets, tile.offsets_at, tile.offsets_step),
            (tile.row_scales, tile.row_scales_at, tile.row_scales_step),
        )
    )
    totals = _variables(builder, num_rows, FLOATS)
    _store_all(builder, totals, filled(FLOATS, 0.0))
    sums = _variables(builder, num_rows, WORDS)
    with cgutils.for_range_slice(builder, constant(0), tile.num_inputs, tile.run, intp=INDEX) as (
        begin,
        number,
    ):
        group = builder.add(tile.group_at, builder.mul(number, tile.group_step))
        _start_sums(builder, sums, tile, group, offsets, number)
        (_add_run if LANES == 16 else _add_run_avx2)(builder, sums, qvalues, tile, begin)
        scales = [
            load_vector(builder, tile.scales, builder.add(group, constant(c)), FLOATS, 4)
            for c in _COLUMNS
        ]
        for row_sums, row_totals in zip(sums, totals, strict=True):
            for integers, total, scale in zip(row_sums, row_totals, scales, strict=True):
                values = builder.sitofp(builder.load(integers), FLOATS)
                builder.store(fma(builder, values, scale, builder.load(total)), total)
    for row, row_totals in enumerate(totals):
        exists = builder.icmp_signed("<", constant(row), tile.count)
        with builder.if_then(exists, likely=True):
            scale = broadcast(builder, builder.load(row_scales[row]))
            at = builder.add(tile.y_at, builder.mul(constant(row), tile.y_step))
            for c, total in zip(_COLUMNS, row_totals, strict=True):
                pointer = vector_at(builder, tile.y, builder.add(at, constant(c)), FLOATS)
                given = builder.load(pointer, align=4)
                builder.store(fma(builder, builder.load(total), scale, given), pointer, align=4)


def _variables(builder, num_rows: int, vector) -> list[list[Any]]:
    """Emit variables [num_rows][vectors of a panel]. LLVM keeps them in registers if they fit."""
    return [[cgutils.alloca_once(builder, vector) for _ in _COLUMNS] for _ in range(num_rows)]


def _store_all(builder, variables: list[list[Any]], value) -> None:
    for row in variables:
        for variable in row:
            builder.store(value, variable)


def _start_sums(builder, sums, tile: _Tile, group, offsets, run_number) -> None:
    """Emit `sums = zeros * offsets`.

    The sums then start with minus the zero point times the activations of the run. This subtracts
    the zero points from all codes of the run.
    """
    zeros = []
    for c in _COLUMNS:
        at = builder.add(group, constant(c))
        narrow = load_vector(builder, tile.zeros, at, ir.VectorType(BYTE, LANES), 1)
        zeros.append(builder.zext(narrow, WORDS))
    for row, pointer in zip(sums, offsets, strict=True):
        offset = broadcast(builder, builder.load(builder.gep(pointer, [run_number])))
        for variable, zero in zip(row, zeros, strict=True):
            builder.store(_multiply_zeros(builder, zero, offset), variable)


def _multiply_zeros(builder, zeros, offset):
    if LANES != 16:
        return builder.mul(zeros, offset)
    # The upper 16 bits of a zero point are 0, so the upper half of an offset is multiplied by 0.
    multiply_add = _instruction(builder, "llvm.x86.avx512.vpdpwssd.512")
    return builder.call(multiply_add, [filled(WORDS, 0), zeros, offset])


def _add_run(builder, sums, qvalues, tile: _Tile, begin) -> None:
    """Emit `sums += codes * activations` for the inputs of the run that begins at `begin`."""
    multiply_add = _instruction(builder, "llvm.x86.avx512.vpdpbusd.512")
    end = _minimum(builder, builder.add(begin, tile.run), tile.num_inputs)
    with cgutils.for_range_slice(builder, begin, end, constant(UNIT_INPUTS), intp=INDEX) as (k, _):
        lower, upper = _codes_as_bytes(builder, tile, k)
        for row, pointer in zip(sums, qvalues, strict=True):
            for first, columns in ((0, lower), (4, upper)):
                inputs = _four_inputs(builder, pointer, k, first)
                for variable, column in zip(row, columns, strict=True):
                    total = builder.call(multiply_add, [builder.load(variable), column, inputs])
                    builder.store(total, variable)


def _minimum(builder, a, b):
    return builder.select(builder.icmp_signed("<=", a, b), a, b)


def _add_run_avx2(builder, sums, qvalues, tile: _Tile, begin) -> None:
    """Do the work of `_add_run` with AVX2.

    The products of `_SHORT_RUN` inputs are added to sums of 16 bits, which are then added to the
    sums of 32 bits.
    """
    halves = ir.VectorType(HALF_WORD, 2 * LANES)
    short_sums = _variables(builder, len(sums), halves)
    end = _minimum(builder, builder.add(begin, tile.run), tile.num_inputs)
    with cgutils.for_range_slice(builder, begin, end, constant(_SHORT_RUN), intp=INDEX) as (
        first,
        _,
    ):
        _store_all(builder, short_sums, ir.Constant(halves, [0] * (2 * LANES)))
        _add_short_run(builder, short_sums, qvalues, tile, first, end)
        _widen(builder, sums, short_sums)


def _add_short_run(builder, short_sums, qvalues, tile: _Tile, first, end) -> None:
    """Emit `short_sums += codes * activations` for at most `_SHORT_RUN` inputs from `first` on."""
    quads = ir.VectorType(BYTE, 4 * LANES)
    kind = ir.FunctionType(ir.VectorType(HALF_WORD, 2 * LANES), [quads] * 2)
    multiply = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.ub.sw")
    stop = _minimum(builder, builder.add(first, constant(_SHORT_RUN)), end)
    with cgutils.for_range_slice(builder, first, stop, constant(UNIT_INPUTS), intp=INDEX) as (k, _):
        for position, columns in enumerate(_codes_as_bytes(builder, tile, k)):
            for row, pointer in zip(short_sums, qvalues, strict=True):
                inputs = builder.bitcast(_four_inputs(builder, pointer, k, 4 * position), quads)
                for variable, column in zip(row, columns, strict=True):
                    products = builder.call(multiply, [builder.bitcast(column, quads), inputs])
                    builder.store(builder.add(builder.load(variable), products), variable)


def _widen(builder, sums, short_sums) -> None:
    """Emit `sums += short_sums`, where each sum of 32 bits gets two adjacent sums of 16 bits."""
    halves = ir.VectorType(HALF_WORD, 2 * LANES)
    kind = ir.FunctionType(WORDS, [halves] * 2)
    multiply = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pmadd.wd")
    ones = ir.Constant(halves, [1] * (2 * LANES))
    for row, short_row in zip(sums, short_sums, strict=True):
        for variable, short in zip(row, short_row, strict=True):
            pairs = builder.call(multiply, [builder.load(short), ones])
            builder.store(builder.add(builder.load(variable), pairs), variable)


def _four_inputs(builder, pointer, k, position: int):
    """Emit a vector with the activations `k + position` to `k + position + 3` in each word."""
    at = builder.gep(pointer, [builder.add(k, constant(position))])
    return broadcast(builder, builder.load(builder.bitcast(at, WORD.as_pointer()), align=1))


def _codes_as_bytes(builder, tile: _Tile, k) -> tuple[list[Any], list[Any]]:
    """Emit the two sets of vectors of `_unpack` for the tile's codes."""
    if not tile.is_expanded:
        return _unpack(builder, tile.codes, tile.codes_at, k)
    first = builder.add(
        tile.codes_at, builder.mul(builder.lshr(k, constant(3)), constant(2 * _UNIT_BYTES))
    )
    lower, upper = (
        [
            load_vector(builder, tile.codes, builder.add(first, constant(start + 4 * c)), WORDS, 1)
            for c in _COLUMNS
        ]
        for start in (0, _UNIT_BYTES)
    )
    return lower, upper


def _unpack(builder, codes, codes_at, k) -> tuple[list[Any], list[Any]]:
    """Emit two sets of vectors with the codes of all outputs as bytes.

    The first set has the codes of the inputs k to k + 3, and the second set those of k + 4 to
    k + 7. The codes of the next block are prefetched into the L2 cache.
    """
    offset = builder.mul(builder.lshr(k, constant(3)), constant(_UNIT_BYTES))
    at = builder.add(codes_at, offset)
    ahead = BLOCK_INPUTS // UNIT_INPUTS * _UNIT_BYTES
    mask, lower, upper = filled(WORDS, 0x0F0F0F0F), [], []
    for c in _COLUMNS:
        index = builder.add(at, constant(4 * c))
        prefetch_pointer(builder, builder.gep(codes, [builder.add(index, constant(ahead))]))
        word = load_vector(builder, codes, index, WORDS, 1)
        lower.append(builder.and_(word, mask))
        upper.append(builder.and_(builder.lshr(word, filled(WORDS, 4)), mask))
    return lower, upper


def _instruction(builder, name: str):
    """Return an LLVM intrinsic that adds products of integers to a vector of int32 sums."""
    function = ir.FunctionType(WORDS, [WORDS] * 3)
    return cgutils.get_or_insert_function(builder.module, function, name)
