"""Scores of attention with AMX over a bfloat16 cache, see `cpu_amx/bf16`."""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.cpu_amx.intrinsics import split_row, transpose, transpose_sum
from penstock.kernels.attention.cpu_amx.layout import BF16_STEP, CHUNK, SPLITS
from penstock.kernels.attention.cpu_amx.products import (
    few_rows_times_keys,
    rows_times_keys,
    write_query_tiles,
)
from penstock.kernels.cpu_common.amx import ROWS, TILE
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.simd import load_wide, store, vadd

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Longs = npt.NDArray[np.int64]


@inner()
def split_queries(
    query: Any, start: int, num_rows: int, group: int, head: int, scale: float, few: bool,
    splits: Floats, q: Floats,
) -> None:  # fmt: skip
    """Write the splits of the scaled query rows to tiles in `q`, with one column per query row.

    Few rows: [D / 32] tiles. More rows: [rows / 16, D / 32, 3] tiles. `splits` is scratch.
    """
    steps, apart = query.shape[2] // BF16_STEP, num_rows * ROWS if few else TILE
    for begin in range(0, num_rows, ROWS):
        for step in range(steps):
            for r in range(begin, min(begin + ROWS, num_rows)):
                x = query[start + r // group, head * group + r % group]
                split_row(x, step * BF16_STEP, scale, splits, (r - begin) * ROWS, apart)
            write_query_tiles(splits, few, begin // ROWS * steps + step, q)


@inner()
def few_scores(
    rows: Halves, values_at: int, starts: Longs, head_dim: int, num_rows: int, q: Floats,
    found: Floats, scores: Floats, span: int,
) -> None:  # fmt: skip
    """Compute the scores of few query rows for all `span` positions.

    For `starts` see `prefetch_ahead`. `found` is scratch.
    """
    num_tiles, apart = span // ROWS, num_rows * ROWS
    transposed = found[2 * CHUNK * TILE :]
    for begin in range(0, num_tiles, 2 * CHUNK):
        end = min(begin + 2 * CHUNK, num_tiles)
        few_rows_times_keys(rows, values_at, starts, begin, end, head_dim, q, found)
        for number in range(begin, end):
            transpose(found, (number - begin) * TILE, transposed, 0, ROWS)
            for r in range(num_rows):
                at = r * ROWS
                summed = vadd(load_wide(transposed, at), load_wide(transposed, at + apart))
                summed = vadd(summed, load_wide(transposed, at + 2 * apart))
                store(scores, r * span + number * ROWS, summed)


@inner()
def many_scores(
    rows: Halves, values_at: int, starts: Longs, head_dim: int, num_rows: int, q: Floats,
    found: Floats, scores: Floats, span: int,
) -> None:  # fmt: skip
    """Compute the same as `few_scores`, for more query rows."""
    num_tiles = span // ROWS
    for begin in range(0, num_tiles, CHUNK):
        end = min(begin + CHUNK, num_tiles)
        for row in range(0, num_rows, ROWS):
            rows_times_keys(rows, values_at, starts, begin, end, head_dim, row, q, found)
            for number in range(begin, end):
                into = row * span + number * ROWS
                transpose_sum(found, (number - begin) * SPLITS, scores, into, span)
