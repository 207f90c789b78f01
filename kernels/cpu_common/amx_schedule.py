"""Lists the tile products of a step of `linear/cpu_f32_amx_bf16x6`, and allocates tile registers.

A row tile contains inputs, and a column tile contains weights. Each float32 is split into three
bfloat16 parts with 8 of the 24 significant bits each. A product of two float32 is then a sum of
nine products of parts. Six of the nine are computed; the other three are below the last bit of the
result. Registers 0 to 3 are for accumulators, registers 4 to 7 for operands.
`cpu_common/amx.emit_tile_ops` turns a list of loads and multiplications into code for numba.
"""

from typing import NamedTuple

NUM_SPLITS = 3
"""Number of bfloat16 parts into which a float32 is split."""


class TileProduct(NamedTuple):
    """A product of one part of a row tile and one part of a column tile.

    The product is added to the accumulator of this pair of tiles.
    """

    row: int  # number of the row tile
    column: int  # number of the column tile
    row_split: int  # number of the part of the row tile
    column_split: int  # number of the part of the column tile


def tile_products(num_rows: int, num_columns: int) -> list[TileProduct]:
    """Return the products of a step over 32 columns of inputs: six per row tile and column tile.

    Products of parts that are below the last bit of a float32 are left out. The products of every
    pair of tiles have the same order.
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
    of_rows: bool  # True for a row tile, False for a column tile
    number: int  # number of the tile
    split: int  # number of the part of the tile


class Multiply(NamedTuple):
    """Multiplies the tiles in the registers `rows` and `columns`; adds the product to `sums`."""

    sums: int
    rows: int
    columns: int


def allocate_registers(
    dots: list[TileProduct], num_columns: int, for_rows: int
) -> list[Load | Multiply]:
    """Convert the products `dots` to multiplications of registers, with the loads that they need.

    The first `for_rows` of the registers 4 to 7 are for row tiles, the others for column tiles. A
    load replaces the tile whose next use is furthest away (Belady, 1966).
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
