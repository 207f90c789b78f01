"""Weighted sums of values of attention with AMX, see `cpu_amx/attend`."""

# mypy: disable-error-code="no-untyped-call"

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.cpu_amx.intrinsics import (
    interleave,
    split_row,
    tile_load,
    tile_multiply,
    tile_store,
    tile_zero,
)
from penstock.kernels.attention.cpu_amx.layout import CHUNK, SPLITS, STEP, prefetch_ahead
from penstock.kernels.cpu_common.amx import ROWS, TILE
from penstock.kernels.cpu_common.amx_schedule import NUM_SPLITS
from penstock.kernels.cpu_common.late_codegen import inner

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Longs = npt.NDArray[np.int64]

_zero_0, _zero_1, _zero_2 = (tile_zero(register) for register in range(3))
_zero_4, _zero_5, _zero_6, _zero_7 = (tile_zero(register) for register in range(4, 8))
_load_0, _load_1, _load_2, _load_3 = (tile_load(register) for register in range(4))
_load_4, _load_5, _load_6, _load_7 = (tile_load(register) for register in range(4, 8))
_store_0, _store_1, _store_2 = (tile_store(register) for register in range(3))
_store_4, _store_5, _store_6, _store_7 = (tile_store(register) for register in range(4, 8))
_add_0, _add_1 = tile_multiply(0, 4, 3), tile_multiply(1, 5, 3)
_add_2 = tile_multiply(2, 6, 3)
_add_few_4, _add_few_5 = tile_multiply(4, 3, 0), tile_multiply(5, 3, 1)
_add_few_6, _add_few_7 = tile_multiply(6, 3, 2), tile_multiply(7, 3, 0)


@inner()
def _interleave_values(
    rows: Halves, first: int, second: int, head_dim: int, tiles: Floats, into: int
) -> None:
    """Write the tiles of the values of 32 positions.

    The values of the first 16 positions begin at `rows[first]`, those of the others at
    `rows[second]`.
    """
    for half in range(2):
        at = second if half else first
        for j in range(ROWS // 2):
            for i in range(0, head_dim, STEP):
                to = into + i * ROWS + (half * (ROWS // 2) + j) * ROWS
                interleave(rows, at + i, at + head_dim + i, tiles, to)
            at += 2 * head_dim


@inner()
def _prepare_values(
    rows: Halves, first: int, second: int, head_dim: int, begin: int, end: int, tail: Halves,
    tiles: Floats, into: int,
) -> None:  # fmt: skip
    """Do the work of `_interleave_values`, with zeros outside the positions [begin, end).

    The other slots may contain anything, and 0 * NaN is not 0. `tail` is scratch [32 * D].
    """
    if begin <= 0 and end >= STEP:
        _interleave_values(rows, first, second, head_dim, tiles, into)
        return
    tail[:] = 0
    for s in range(max(begin, 0), min(end, STEP)):
        at = first + s * head_dim if s < ROWS else second + (s - ROWS) * head_dim
        for i in range(head_dim):
            tail[s * head_dim + i] = rows[at + i]
    _interleave_values(tail, 0, ROWS * head_dim, head_dim, tiles, into)


@inner()
def _few_values(
    splits: Floats, values: Floats, count: int, head_dim: int, is_first: bool, sums: Floats
) -> None:
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
            _add_few_4()
            _load_1(values, at + TILE)
            _add_few_5()
            _load_2(values, at + 2 * TILE)
            _add_few_6()
            _load_0(values, at + 3 * TILE)
            _add_few_7()
        _store_4(sums, n)
        _store_5(sums, n + TILE)
        _store_6(sums, n + 2 * TILE)
        _store_7(sums, n + 3 * TILE)


@inner()
def _many_values(
    splits: Floats, values: Floats, count: int, head_dim: int, is_first: bool, sums: Floats, at: int
) -> None:
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
            _add_0()
            _load_5(splits, split + TILE)
            _add_1()
            _load_6(splits, split + 2 * TILE)
            _add_2()
        _store_0(sums, at)
        _store_1(sums, at + TILE)
        _store_2(sums, at + 2 * TILE)
        at += SPLITS


@inner()
def add_values(
    rows: Halves, values_at: int, starts: Longs, head_dim: int, begin: int, end: int,
    num_rows: int, few: bool, scores: Floats, span: int, splits: Floats, values: Floats,
    tail: Halves, sums: Floats,
) -> None:  # fmt: skip
    """Compute the weighted sums of the values, separately for each part of the weights.

    Only the positions [begin, end) have values. The arguments from `splits` to `tail` are scratch.
    """
    num_tiles = span // ROWS
    apart = num_rows * ROWS if few else TILE
    for first in range(0, num_tiles // 2, CHUNK):
        count = min(CHUNK, num_tiles // 2 - first)
        for step in range(count):
            number, low = 2 * (first + step), (first + step) * STEP
            prefetch_ahead(rows, starts, num_tiles + number, values_at, head_dim)
            prefetch_ahead(rows, starts, num_tiles + number + 1, values_at, head_dim)
            _prepare_values(
                rows, values_at + starts[number], values_at + starts[number + 1], head_dim,
                begin - low, end - low, tail, values, step * ROWS * head_dim,
            )  # fmt: skip
        for row in range(0, num_rows, ROWS):
            for step in range(count):
                for r in range(row, min(row + ROWS, num_rows)):
                    at = r * span + (first + step) * STEP
                    into = step * SPLITS + (r - row) * ROWS
                    split_row(scores, at, np.float32(1), splits, into, apart)
            if few:
                _few_values(splits, values, count, head_dim, first == 0, sums)
            else:
                at = row * NUM_SPLITS * head_dim
                _many_values(splits, values, count, head_dim, first == 0, sums, at)
