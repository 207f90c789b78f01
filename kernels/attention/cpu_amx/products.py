"""Tile products of attention with AMX, see `cpu_amx/attend`.

The loops are the same for a bfloat16 and an INT8 cache. A tile of keys has 64 bytes of features for
each of 16 positions. The dtype of `rows`, the flat cache, decides which instruction multiplies.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.cpu_amx.intrinsics import (
    tile_load,
    tile_load_rows,
    tile_multiply,
    tile_store,
    tile_zero,
    transpose,
)
from penstock.kernels.attention.cpu_amx.layout import SPLITS, prefetch_ahead
from penstock.kernels.cpu_common.amx import ROWS, TILE
from penstock.kernels.cpu_common.amx_schedule import NUM_SPLITS
from penstock.kernels.cpu_common.late_codegen import inner

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]

_zero_0, _zero_1, _zero_2 = (tile_zero(register) for register in range(3))
_zero_4, _zero_5, _zero_6, _zero_7 = (tile_zero(register) for register in range(4, 8))
_load_0, _load_1, _load_2, _load_3 = (tile_load(register) for register in range(4))
_load_4, _load_5, _load_6, _load_7 = (tile_load(register) for register in range(4, 8))
_load_keys_2, _load_keys_3 = tile_load_rows(2), tile_load_rows(3)
_store_0, _store_1, _store_2 = (tile_store(register) for register in range(3))
_store_4, _store_5, _store_6, _store_7 = (tile_store(register) for register in range(4, 8))
_keys_few_0 = tile_multiply(0, 2, 1)
_keys_0, _keys_1, _keys_2 = (tile_multiply(each, 3, 4 + each) for each in range(3))
_values_0, _values_1, _values_2 = (tile_multiply(each, 4 + each, 3) for each in range(3))
_values_few_4, _values_few_5 = tile_multiply(4, 3, 0), tile_multiply(5, 3, 1)
_values_few_6, _values_few_7 = tile_multiply(6, 3, 2), tile_multiply(7, 3, 0)


@inner()
def write_query_tiles(splits: Floats, few: bool, number: int, q: Floats) -> None:
    """Transpose the splits of query rows, which are rows in `splits`, to columns of tiles in `q`.

    Few query rows have one tile, which is tile `number` of `q`. More rows have three tiles, one for
    each split, which are group `number` of such tiles.
    """
    if few:
        transpose(splits, 0, q, number * TILE, ROWS)
    else:
        for split in range(NUM_SPLITS):
            transpose(splits, split * TILE, q, number * SPLITS + split * TILE, ROWS)


@inner()
def few_rows_times_keys(
    rows: Any, values_at: int, starts: Longs, begin: int, end: int, head_dim: int, q: Floats,
    found: Floats,
) -> None:  # fmt: skip
    """Multiply the key tiles [begin, end) by few query rows.

    For each key tile, one tile of products is stored to `found`. Its rows are positions, and its
    columns are those of the tiles `q`. For `starts` see `prefetch_ahead`.
    """
    step = 64 // rows.itemsize
    for number in range(begin, end):
        prefetch_ahead(rows, starts, number, values_at, head_dim)
        _zero_0()
        for i in range(head_dim // step):
            _load_keys_2(rows, starts[number] + i * step, head_dim * rows.itemsize)
            _load_1(q, i * TILE)
            _keys_few_0(rows)
        _store_0(found, (number - begin) * TILE)


@inner()
def rows_times_keys(
    rows: Any, values_at: int, starts: Longs, begin: int, end: int, head_dim: int, row: int,
    q: Floats, found: Floats,
) -> None:  # fmt: skip
    """Multiply the key tiles [begin, end) by 16 query rows, the first of which is `row`.

    For each key tile, three tiles are stored, one for each split of the query rows.
    """
    step = 64 // rows.itemsize
    for number in range(begin, end):
        if row == 0:
            prefetch_ahead(rows, starts, number, values_at, head_dim)
        at, into = row // ROWS * (head_dim // step) * SPLITS, (number - begin) * SPLITS
        _zero_0()
        _zero_1()
        _zero_2()
        for i in range(head_dim // step):
            _load_keys_3(rows, starts[number] + i * step, head_dim * rows.itemsize)
            _load_4(q, at)
            _keys_0(rows)
            _load_5(q, at + TILE)
            _keys_1(rows)
            _load_6(q, at + 2 * TILE)
            _keys_2(rows)
            at += SPLITS
        _store_0(found, into)
        _store_1(found, into + TILE)
        _store_2(found, into + 2 * TILE)


@inner()
def few_rows_times_values(
    rows: Any, splits: Floats, values: Floats, count: int, head_dim: int, is_first: bool,
    sums: Floats,
) -> None:  # fmt: skip
    """Add the weighted values of `count` steps to the `sums` of few query rows."""
    size = ROWS * head_dim
    for n in range(0, size, 4 * TILE):
        if is_first:
            _zero_4()
            _zero_5()
            _zero_6()
            _zero_7()
        else:
            _load_4(sums, n)
            _load_5(sums, n + TILE)
            _load_6(sums, n + 2 * TILE)
            _load_7(sums, n + 3 * TILE)
        for step in range(count):
            at = step * size + n
            _load_3(splits, step * SPLITS)
            _load_0(values, at)
            _values_few_4(rows)
            _load_1(values, at + TILE)
            _values_few_5(rows)
            _load_2(values, at + 2 * TILE)
            _values_few_6(rows)
            _load_0(values, at + 3 * TILE)
            _values_few_7(rows)
        _store_4(sums, n)
        _store_5(sums, n + TILE)
        _store_6(sums, n + 2 * TILE)
        _store_7(sums, n + 3 * TILE)


@inner()
def rows_times_values(
    rows: Any, splits: Floats, values: Floats, count: int, head_dim: int, is_first: bool,
    sums: Floats, at: int,
) -> None:  # fmt: skip
    """Add the weighted values of `count` steps to the sums of 16 query rows at `sums[at:]`."""
    size = ROWS * head_dim
    for n in range(0, size, TILE):
        if is_first:
            _zero_0()
            _zero_1()
            _zero_2()
        else:
            _load_0(sums, at)
            _load_1(sums, at + TILE)
            _load_2(sums, at + 2 * TILE)
        for step in range(count):
            split = step * SPLITS
            _load_3(values, step * size + n)
            _load_4(splits, split)
            _values_0(rows)
            _load_5(splits, split + TILE)
            _values_1(rows)
            _load_6(splits, split + 2 * TILE)
            _values_2(rows)
        _store_0(sums, at)
        _store_1(sums, at + TILE)
        _store_2(sums, at + 2 * TILE)
        at += SPLITS
