"""Weighted sums of the values of a bfloat16 cache, computed with AMX. See `cpu_amx/bf16`."""

# mypy: disable-error-code="no-untyped-call"

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.cpu_amx.intrinsics import interleave, split_row
from penstock.kernels.attention.cpu_amx.layout import BF16_STEP, CHUNK, SPLITS, prefetch_ahead
from penstock.kernels.attention.cpu_amx.products import few_rows_times_values, rows_times_values
from penstock.kernels.cpu_common.amx import ROWS, TILE
from penstock.kernels.cpu_common.amx_schedule import NUM_SPLITS
from penstock.kernels.cpu_common.late_codegen import inner

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Longs = npt.NDArray[np.int64]


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
            for i in range(0, head_dim, BF16_STEP):
                to = into + i * ROWS + (half * (ROWS // 2) + j) * ROWS
                interleave(rows, at + i, at + head_dim + i, tiles, to)
            at += 2 * head_dim


@inner()
def _prepare_values(
    rows: Halves, first: int, second: int, head_dim: int, begin: int, end: int, tail: Halves,
    tiles: Floats, into: int,
) -> None:  # fmt: skip
    """Write the tiles of the values of 32 positions, with zeros outside of [begin, end).

    The slots outside may contain NaN, and 0 * NaN is not 0. `tail` is a scratch array of 32 * D
    elements. The other arguments are those of `_interleave_values`.
    """
    if begin <= 0 and end >= BF16_STEP:
        _interleave_values(rows, first, second, head_dim, tiles, into)
        return
    tail[:] = 0
    for s in range(max(begin, 0), min(end, BF16_STEP)):
        at = first + s * head_dim if s < ROWS else second + (s - ROWS) * head_dim
        slot, copy = rows[at : at + head_dim], tail[s * head_dim : (s + 1) * head_dim]
        for i in range(len(copy)):
            copy[i] = slot[i]
    _interleave_values(tail, 0, ROWS * head_dim, head_dim, tiles, into)


@inner()
def add_values(
    rows: Halves, values_at: int, starts: Longs, head_dim: int, begin: int, end: int,
    num_rows: int, few: bool, scores: Floats, span: int, splits: Floats, values: Floats,
    tail: Halves, sums: Floats,
) -> None:  # fmt: skip
    """Compute the weighted sums of the values, with separate sums for each split of the weights.

    The slots of positions outside of [begin, end) contain no values. `splits`, `values` and `tail`
    are scratch arrays.
    """
    num_tiles = span // ROWS
    apart = num_rows * ROWS if few else TILE
    for first in range(0, num_tiles // 2, CHUNK):
        count = min(CHUNK, num_tiles // 2 - first)
        for step in range(count):
            number, low = 2 * (first + step), (first + step) * BF16_STEP
            prefetch_ahead(rows, starts, num_tiles + number, values_at, head_dim)
            prefetch_ahead(rows, starts, num_tiles + number + 1, values_at, head_dim)
            _prepare_values(
                rows, values_at + starts[number], values_at + starts[number + 1], head_dim,
                begin - low, end - low, tail, values, step * ROWS * head_dim,
            )  # fmt: skip
        for row in range(0, num_rows, ROWS):
            for step in range(count):
                for r in range(row, min(row + ROWS, num_rows)):
                    at = r * span + (first + step) * BF16_STEP
                    into = step * SPLITS + (r - row) * ROWS
                    split_row(scores, at, np.float32(1), splits, into, apart)
            if few:
                few_rows_times_values(rows, splits, values, count, head_dim, first == 0, sums)
            else:
                at = row * NUM_SPLITS * head_dim
                rows_times_values(rows, splits, values, count, head_dim, first == 0, sums, at)
