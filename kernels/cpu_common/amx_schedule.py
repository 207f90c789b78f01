"""Products of one step of `linear/cpu_f32_amx_bf16x6`, and the allocation of its tile registers.

A float32 is split into three bfloat16 parts with 8 of its 24 bits each. Six of the nine products of
parts are computed; the other three are below the last bit. Registers 0 to 3 hold accumulators, 4 to
7 operands. `cpu_common/amx.emit_tile_ops` turns the resulting list into code for numba.
"""

from typing import NamedTuple

NUM_SPLITS = 3
"""Parts that a float32 is split into."""


class TileProduct(NamedTuple):
    """Adds the product of one part of a row tile and one part of a column tile to a sum."""

    row: int  # row tile
    column: int  # column tile
    row_split: int  # part of the row tile
    column_split: int  # part of the column tile


def tile_products(num_rows: int, num_columns: int) -> list[TileProduct]:
    """List the products of a step over 32 inputs: six per pair of row tile and column tile.

    They are the products of parts that are not below the last bit of a float32, in the same order
    for every sum.
    """
    return [
        TileProduct(row, column, row_split, column_split)
        for row_split in range(NUM_SPLITS)
        for row in range(num_rows)
        for column in range(num_columns)
        for column_split in reversed(range(NUM_SPLITS - row_split))
    ]


class Load(NamedTuple):
    """Loads one part of a row tile or column tile into a register."""

    register: int
    of_rows: bool  # a row tile, not a column tile
    number: int  # of the tile
    split: int  # part of the tile


class Multiply(NamedTuple):
    """Multiplies two registers and adds the product to a third."""

    sums: int
    rows: int
    columns: int


def allocate_registers(
    dots: list[TileProduct], num_columns: int, for_rows: int
) -> list[Load | Multiply]:
    """Insert the loads that `dots` need before them.

    The first `for_rows` of registers 4 to 7 hold row tiles, the others column tiles. A load
    replaces the tile whose next use is furthest away (Belady, 1966).
    """
    holds: dict[bool, dict[int, tuple[int, int] | None]] = {
        True: dict.fromkeys(range(4, 4 + for_rows)),
        False: dict.fromkeys(range(4 + for_rows, 8)),
    }
    used = {
        True: [(dot.row, dot.row_split) for dot in dots],
        False: [(dot.column, dot.column_split) for dot in dots],
    }
    done: list[Load | Multiply] = []
    for at, dot in enumerate(dots):
        registers = {}
        for of_rows, held in holds.items():
            tile, later = used[of_rows][at], used[of_rows][at:]
            if tile not in held.values():
                free = max(held, key=lambda r: _next_use(held[r], later))
                held[free] = tile
                done.append(Load(free, of_rows, *tile))
            registers[of_rows] = next(r for r, kept in held.items() if kept == tile)
        sums = dot.row * num_columns + dot.column
        done.append(Multiply(sums, registers[True], registers[False]))
    return done


def _next_use(tile: tuple[int, int] | None, later: list[tuple[int, int]]) -> int:
    """Return the index of `tile` in `later`, or `len(later)` if it is not used again."""
    return later.index(tile) if tile in later else len(later)
