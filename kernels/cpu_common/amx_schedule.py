"""What is multiplied in a step of `linear/cpu_f32_amx_bf16x6`, and which register holds what
meanwhile.

A float32 is split into three bfloat16 parts, each with 8 of its 24 bits, and six of their nine
products are computed: what is left out is below the last bit. Registers 0 to 3 hold sums, 4 to 7
what is multiplied. No numbers here: plans, of which `cpu_common/amx` makes code that numba
compiles (so that this file, too, counts where compiled code is kept: `compiled`).
"""

from typing import NamedTuple

NUM_SPLITS = 3
"""Of a float32."""


class TileProduct(NamedTuple):
    """Sums (row, column) += A (row, its part) B (column, its part)."""

    row: int
    column: int
    row_split: int
    column_split: int


def tile_products(num_rows: int, num_columns: int) -> list[TileProduct]:
    """A step through 32 inputs, of so many tiles of rows and of columns: the six products of parts
    that are not below the last bit of a float32, for each sum in the same order."""
    return [
        TileProduct(row, column, row_split, column_split)
        for row_split in range(NUM_SPLITS)
        for row in range(num_rows)
        for column in range(num_columns)
        for column_split in reversed(range(NUM_SPLITS - row_split))
    ]


class Load(NamedTuple):
    """What a register is to hold: a part of a tile of rows, or of columns."""

    register: int
    of_rows: bool
    number: int
    split: int


class Multiply(NamedTuple):
    """Registers."""

    sums: int
    rows: int
    columns: int


def allocate_registers(
    dots: list[TileProduct], num_columns: int, for_rows: int
) -> list[Load | Multiply]:
    """The dots with their loads: `for_rows` of registers 4 to 7 are for rows, the others for
    columns. What is used again last gives way (Belady, 1966)."""
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
    return later.index(tile) if tile in later else len(later)
