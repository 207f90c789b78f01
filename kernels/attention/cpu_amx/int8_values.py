"""Weighted sums of the values of an INT8 cache, computed with AMX. See `cpu_amx/int8`."""

# mypy: disable-error-code="no-untyped-call"

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.cpu_amx.int8_intrinsics import (
    add_features,
    interleave_4,
    split_digits,
)
from penstock.kernels.attention.cpu_amx.layout import (
    AHEAD,
    CHUNK,
    INT8_STEP,
    SPLITS,
    prefetch_ahead,
)
from penstock.kernels.attention.cpu_amx.products import few_rows_times_values, rows_times_values
from penstock.kernels.cpu_common.amx import ROWS, TILE
from penstock.kernels.cpu_common.amx_schedule import NUM_SPLITS
from penstock.kernels.cpu_common.late_codegen import inner

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int8]
Longs = npt.NDArray[np.int64]

_MAX_STEPS = 65536 // INT8_STEP
"""Number of steps whose sums fit into int32: a product of a digit and a code is at most 2^14. Sums
of more steps are added as float32."""

_TILES = INT8_STEP // ROWS


@inner()
def _interleave_values(
    rows: Codes, values_at: int, starts: Longs, number: int, head_dim: int, tiles: Floats, into: int
) -> None:
    """Write the tiles of the values of 64 positions, from the first one of key tile `number` on."""
    num_tiles = len(starts) - AHEAD
    for tile in range(_TILES):
        at = values_at + starts[number + tile]
        prefetch_ahead(rows, starts, num_tiles + number + tile, values_at, head_dim)
        for four in range(ROWS // 4):
            to = into + (tile * (ROWS // 4) + four) * ROWS
            for i in range(0, head_dim, INT8_STEP):
                interleave_4(rows, at + four * 4 * head_dim + i, head_dim, tiles, to + i * ROWS)


@inner()
def _add_totals(sums: Floats, num_rows: int, few: bool, head_dim: int, totals: Floats) -> None:
    """Add the `sums` of digits to the `totals` [rows, D]."""
    for r in range(num_rows):
        at, tile_step, digit_step = r * ROWS, TILE, num_rows * ROWS
        if not few:
            at = r // ROWS * NUM_SPLITS * ROWS * head_dim + r % ROWS * ROWS
            tile_step, digit_step = SPLITS, TILE
        for i in range(0, head_dim, INT8_STEP):
            add_features(sums, at, tile_step, digit_step, totals, r * head_dim + i)
            at += INT8_STEP // ROWS * tile_step


@inner()
def add_values(
    rows: Codes, values_at: int, starts: Longs, first_step: int, head_dim: int, num_rows: int,
    few: bool, weights: Floats, span: int, factors: Floats, splits: Floats, values: Floats,
    sums: Floats, totals: Floats,
) -> None:  # fmt: skip
    """Multiply the weights by `factors`, round them, and add their products with the codes.

    Args:
        rows: the cache as a flat array.
        values_at: index in `rows` at which the values begin.
        starts: where the key tiles begin.
        first_step: number of the first step of 64 positions in the sequence.
        head_dim: features per head.
        num_rows: number of query rows.
        few: whether the digits of all query rows are in one tile.
        weights: [rows, span] softmax weights times the scales of the values.
        span: number of positions.
        factors: [rows] factors of `digit_scale`.
        splits: scratch for digits.
        values: scratch for tiles of values.
        sums: scratch for sums.
        totals: [rows, D] result.
    """
    num_steps, apart = span // INT8_STEP, num_rows * ROWS if few else TILE
    totals[: num_rows * head_dim] = 0
    first = 0
    while first < num_steps:
        # The limits depend only on positions, so that the order of sums does as well.
        until = min(_MAX_STEPS - (first_step + first) % _MAX_STEPS + first, num_steps)
        for begin in range(first, until, CHUNK):
            count = min(CHUNK, until - begin)
            for step in range(count):
                number, into = (begin + step) * _TILES, step * ROWS * head_dim
                _interleave_values(rows, values_at, starts, number, head_dim, values, into)
            for row in range(0, num_rows, ROWS):
                for step in range(count):
                    for r in range(row, min(row + ROWS, num_rows)):
                        at = r * span + (begin + step) * INT8_STEP
                        into = step * SPLITS + (r - row) * ROWS
                        split_digits(weights, at, factors[r], splits, into, apart)
                if few:
                    few_rows_times_values(
                        rows, splits, values, count, head_dim, begin == first, sums
                    )
                else:
                    at = row * NUM_SPLITS * head_dim
                    rows_times_values(
                        rows, splits, values, count, head_dim, begin == first, sums, at
                    )
        _add_totals(sums, num_rows, few, head_dim, totals)
        first = until
