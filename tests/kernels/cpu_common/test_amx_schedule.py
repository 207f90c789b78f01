"""The AMX schedule: register allocation, and the same order of products for all accumulators."""

from itertools import pairwise

import pytest

from penstock.kernels.cpu_common.amx_schedule import (
    NUM_SPLITS,
    Load,
    Multiply,
    TileProduct,
    allocate_registers,
    tile_products,
)

SHAPES = [(4, 1, 1), (2, 2, 2), (1, 4, 1)]


@pytest.mark.parametrize(("rows", "columns", "for_rows"), SHAPES)
def test_operands_are_loaded_before_each_multiplication(
    rows: int, columns: int, for_rows: int
) -> None:
    dots = tile_products(rows, columns)
    registers: dict[int, Load] = {}
    done = []
    for each in allocate_registers(dots, columns, for_rows):
        if isinstance(each, Load):
            row_registers = range(4, 4 + for_rows)
            assert each.register in (row_registers if each.of_rows else range(4 + for_rows, 8))
            registers[each.register] = each
            continue
        assert isinstance(each, Multiply)
        row, column = registers[each.rows], registers[each.columns]
        assert row.of_rows
        assert not column.of_rows
        assert each.sums == row.number * columns + column.number
        done.append(TileProduct(row.number, column.number, row.split, column.split))
    assert done == dots


def test_no_tile_is_loaded_twice_in_a_row() -> None:
    work = allocate_registers(tile_products(4, 1), 1, 1)
    loads = [each for each in work if isinstance(each, Load)]
    assert len(loads) == NUM_SPLITS + 4 * NUM_SPLITS
    assert not any(one == other for one, other in pairwise(loads))


@pytest.mark.parametrize(("rows", "columns", "for_rows"), SHAPES)
def test_every_accumulator_adds_its_products_in_the_same_order(
    rows: int, columns: int, for_rows: int
) -> None:
    orders: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for dot in tile_products(rows, columns):
        orders.setdefault((dot.row, dot.column), []).append((dot.row_split, dot.column_split))
    assert set(orders) == {(r, c) for r in range(rows) for c in range(columns)}
    assert {tuple(order) for order in orders.values()} == {
        ((0, 2), (0, 1), (0, 0), (1, 1), (1, 0), (2, 0))
    }
