"""Numba intrinsics that multiply rows of x by the codes of one panel, for CPUs with AVX2.

Here, a code is always a quantized weight. Codes are converted to float32 in registers, and each
converted vector is multiplied by all rows of the tile. `cpu_dequantizing` describes the arguments
and the order of summation.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from penstock.kernels.cpu_common.emit import (
    BYTE,
    FLOATS,
    INDEX,
    LANES,
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
from penstock.kernels.linear.code_kinds import INT4, INT8
from penstock.kernels.linear.cpu_code_values import Packing, code_value, packing_of
from penstock.kernels.linear.panels import PANEL

TILE_ROWS = LANES // 2
BLOCK_K = 256
"""Number of inputs per block. A block of codes of one panel stays in the L1 cache while all tiles
use it."""

ROW_COUNTS = (1, 2, 4, 6, 8) if LANES == 16 else (1, 2, 4)
"""Numbers of rows for which tiles are compiled."""

_COLUMNS = range(0, PANEL, LANES)


def step_inputs(kind: int) -> int:
    """Return the number of inputs that `multiply_group` converts in one step of its loop."""
    return packing_of(kind).inputs * packing_of(kind).units


@dataclass(frozen=True, slots=True)
class _Tile:
    """The arguments of an intrinsic of `_tile_intrinsic`; arrays are replaced by pointers."""

    x: Any
    x_at: Any
    x_step: Any
    count: Any
    begin: Any
    end: Any
    codes: Any
    codes_at: Any
    scales: Any
    zeros: Any
    groups: Any
    groups_at: Any
    table: Any
    table_at: Any
    sums: Any


def _tile_intrinsic(
    kind: int, emit: Callable[[Any, int, int, _Tile], None], sizes: tuple[int, ...] = ROW_COUNTS
):
    """Return an intrinsic that multiplies a tile. `emit` emits the code for a number of rows.

    `emit` is called once for each number in `sizes`.
    """

    @simd_intrinsic
    def multiply(
        typing, x, x_at, x_step, count, begin, end, codes, codes_at, scales, zeros, groups,
        groups_at, table, table_at, sums,
    ):  # fmt: skip
        """Add the products of inputs [begin, end) to `sums` [TILE_ROWS, PANEL].

        Args:
            x: float32; input k of row r is at index `x_at + r * x_step + k`.
            count: number of rows of x, 1 to TILE_ROWS; the sums of further rows are arbitrary.
            codes: uint8; the panel begins at index `codes_at`.
            scales: float32; the scales of the panel's first group begin at index `groups_at`.
            zeros: uint8 zero points, with the same indices as `scales`.
            groups: int32; the group of each input.
            table: float32; for kinds with a table, the values of codes begin at index `table_at`.
        """
        size = types.intp
        result = types.void(
            x, size, size, size, size, size, codes, size, scales, zeros, groups, size, table, size,
            sums,
        )  # fmt: skip

        def code(context, builder, signature, arguments):
            tile = _Tile(*array_data(context, builder, signature, arguments))
            by_row_count(
                builder, tile.count, sizes, lambda num_rows: emit(builder, kind, num_rows, tile)
            )
            return context.get_dummy_value()

        return result, code

    return multiply


def multiply_group(kind: int):
    """Return an intrinsic of `_tile_intrinsic` for inputs that are all in one group.

    The number of inputs must be a multiple of `step_inputs`. Products are summed without the scale,
    and each sum is multiplied by the scale when it is added to `sums`.
    """
    return _tile_intrinsic(kind, _emit_group)


def multiply_scattered(kind: int):
    """Return an intrinsic of `_tile_intrinsic` for inputs that may be in different groups.

    `begin` must be a multiple of `step_inputs`. Each weight is multiplied by its scale before it is
    multiplied by x.
    """
    return _tile_intrinsic(kind, _emit_scattered)


def convert_group(kind: int):
    """Return an intrinsic that writes the values that `multiply_group` multiplies, without scale.

    It has the arguments of `_tile_intrinsic`. `sums` is [end - begin, PANEL], and `count` is 1. `x`
    is not read.
    """
    return _tile_intrinsic(kind, _emit_group_values, (1,))


def convert_scattered(kind: int):
    """Return an intrinsic that writes the products of values and scales of `multiply_scattered`.

    Its arguments are those of `convert_group`.
    """
    return _tile_intrinsic(kind, _emit_scattered_values, (1,))


def _emit_group(builder, kind: int, num_rows: int, tile: _Tile) -> None:
    rows, group = _x_rows(builder, tile, num_rows), _group_index(builder, tile, tile.begin)
    totals = _zero_totals(builder, num_rows)
    _for_group(
        builder, kind, tile, group, lambda k, values: _multiply(builder, totals, rows, k, values)
    )
    scales = _load_scales(builder, tile, group)
    for at, total in _numbered(totals):
        pointer = vector_at(builder, tile.sums, constant(at), FLOATS)
        sums = fma(builder, builder.load(total), scales[at % PANEL // LANES],
                    builder.load(pointer, align=4))  # fmt: skip
        builder.store(sums, pointer, align=4)


def _emit_group_values(builder, kind: int, num_rows: int, tile: _Tile) -> None:
    group = _group_index(builder, tile, tile.begin)
    _for_group(builder, kind, tile, group, lambda k, values: _store(builder, tile, k, values))


def _for_group(builder, kind: int, tile: _Tile, group, use: Callable[[Any, list[Any]], None]):
    """Emit a loop over inputs of one group; `use(k, values)` emits the use of their values."""
    packing = packing_of(kind)
    zeros = _zeros(builder, kind, tile, group, range(0, min(packing.unit.width, 16), packing.bits))
    table = _load_table(builder, tile)
    step = constant(step_inputs(kind))
    with cgutils.for_range_slice(builder, tile.begin, tile.end, step, intp=INDEX) as (k, _):
        for unit in range(packing.units):
            first = builder.add(k, constant(unit * packing.inputs))
            words = _load_units(builder, packing, tile, first)
            for position in range(packing.inputs):
                values = [
                    code_value(builder, kind, word, position, zeros[c], table)
                    for c, word in enumerate(words)
                ]
                use(builder.add(first, constant(position)), values)


def _emit_scattered(builder, kind: int, num_rows: int, tile: _Tile) -> None:
    rows, totals = _x_rows(builder, tile, num_rows), _zero_totals(builder, num_rows)
    _for_scattered(
        builder, kind, tile, lambda k, values: _multiply(builder, totals, rows, k, values)
    )
    for at, total in _numbered(totals):
        pointer = vector_at(builder, tile.sums, constant(at), FLOATS)
        sums = builder.fadd(builder.load(pointer, align=4), builder.load(total))
        builder.store(sums, pointer, align=4)


def _emit_scattered_values(builder, kind: int, num_rows: int, tile: _Tile) -> None:
    _for_scattered(builder, kind, tile, lambda k, values: _store(builder, tile, k, values))


def _for_scattered(builder, kind: int, tile: _Tile, use: Callable[[Any, list[Any]], None]):
    """Emit a loop over the inputs k.

    `use(k, values)` emits the body of the loop; `values` are the dequantized weights of input k.
    """
    packing, table = packing_of(kind), _load_table(builder, tile)
    with cgutils.for_range_slice(builder, tile.begin, tile.end, constant(1), intp=INDEX) as (
        k,
        _,
    ):
        group = _group_index(builder, tile, k)
        zeros = _zeros(builder, kind, tile, group, [0])
        scales = _load_scales(builder, tile, group)
        position = builder.and_(k, constant(packing.inputs - 1))
        shift = builder.trunc(builder.mul(position, constant(packing.bits)), packing.unit)
        values = []
        for c, word in enumerate(_load_units(builder, packing, tile, k)):
            shifted = builder.lshr(word, broadcast(builder, shift))
            value = code_value(builder, kind, shifted, 0, zeros[c], table)
            values.append(builder.fmul(value, scales[c]))
        use(k, values)


def _store(builder, tile: _Tile, k, values: list[Any]) -> None:
    """Emit stores of the dequantized weights of input k to `tile.sums` [end - begin, PANEL]."""
    at = builder.mul(builder.sub(k, tile.begin), constant(PANEL))
    for c, value in zip(_COLUMNS, values, strict=True):
        pointer = vector_at(builder, tile.sums, builder.add(at, constant(c)), FLOATS)
        builder.store(value, pointer, align=4)


def _load_table(builder, tile: _Tile) -> list[Any]:
    """Emit loads of a table of 16 floats: one vector of 16 lanes, or two of 8."""
    return [
        load_vector(builder, tile.table, builder.add(tile.table_at, constant(at)), FLOATS, 4)
        for at in range(0, 16, LANES)
    ]


def _zeros(builder, kind: int, tile: _Tile, group, bits: Sequence[int]) -> list[dict[int, Any]]:
    """Emit 2^(23 - at) + zero point, for each vector of outputs and each `at` in `bits`.

    `code_value` subtracts these numbers.
    """
    if kind not in (INT4, INT8):
        return [{} for _ in _COLUMNS]
    found = []
    for c in _COLUMNS:
        narrow = load_vector(
            builder, tile.zeros, builder.add(group, constant(c)), ir.VectorType(BYTE, LANES), 1
        )
        wide = builder.uitofp(builder.zext(narrow, WORDS), FLOATS)
        found.append({at: builder.fadd(wide, filled(FLOATS, 2.0 ** (23 - at))) for at in bits})
    return found


def _load_scales(builder, tile: _Tile, group) -> list[Any]:
    return [
        load_vector(builder, tile.scales, builder.add(group, constant(c)), FLOATS, 4)
        for c in _COLUMNS
    ]


def _load_units(builder, packing: Packing, tile: _Tile, k) -> list[Any]:
    """Emit loads of the units that contain input k of all outputs of the panel.

    The codes of the next block are prefetched into the L2 cache.
    """
    row = builder.lshr(k, constant(packing.inputs.bit_length() - 1))
    at = builder.add(tile.codes_at, builder.mul(row, constant(packing.row_bytes)))
    vector, size = ir.VectorType(packing.unit, LANES), packing.unit.width // 8
    ahead = BLOCK_K // packing.inputs * packing.row_bytes
    for line in range(0, packing.row_bytes, 64):
        prefetch_pointer(
            builder, builder.gep(tile.codes, [builder.add(at, constant(ahead + line))])
        )
    return [
        load_vector(builder, tile.codes, builder.add(at, constant(c * size)), vector, 1)
        for c in _COLUMNS
    ]


def _group_index(builder, tile: _Tile, k):
    """Emit the index of the scales and zero points of the group of input k."""
    group = builder.sext(builder.load(builder.gep(tile.groups, [k])), INDEX)
    return builder.add(tile.groups_at, builder.mul(group, constant(PANEL)))


def _x_rows(builder, tile: _Tile, num_rows: int) -> list[Any]:
    return row_pointers(builder, tile.x, tile.x_at, tile.x_step, tile.count, num_rows)


def _zero_totals(builder, num_rows: int) -> list[list[Any]]:
    """Emit sums [num_rows][vectors of a panel] as variables with the value 0.

    LLVM keeps these variables in registers.
    """
    totals = [[cgutils.alloca_once(builder, FLOATS) for _ in _COLUMNS] for _ in range(num_rows)]
    for _, total in _numbered(totals):
        builder.store(filled(FLOATS, 0.0), total)
    return totals


def _numbered(totals: list[list[Any]]) -> list[tuple[int, Any]]:
    """Return each variable and the index of its first element in sums [num_rows, PANEL]."""
    return [
        (r * PANEL + c, total)
        for r, row in enumerate(totals)
        for c, total in zip(_COLUMNS, row, strict=True)
    ]


def _multiply(builder, totals: list[list[Any]], rows: list[Any], k, values: list[Any]) -> None:
    """Emit `totals += x[:, k] * values`."""
    for row, pointer in zip(totals, rows, strict=True):
        x = broadcast(builder, builder.load(builder.gep(pointer, [k])))
        for total, value in zip(row, values, strict=True):
            builder.store(fma(builder, x, value, builder.load(total)), total)
