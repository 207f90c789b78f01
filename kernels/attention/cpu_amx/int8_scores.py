"""Scores of attention with AMX over an INT8 cache, see `cpu_amx/int8`."""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.cpu_amx.int8_intrinsics import (
    load_digits,
    load_f16_as_f32,
    split_digits,
    transpose_digits,
)
from penstock.kernels.attention.cpu_amx.intrinsics import transpose
from penstock.kernels.attention.cpu_amx.layout import CHUNK, INT8_STEP, SPLITS, attended_tiles
from penstock.kernels.attention.cpu_amx.products import (
    few_rows_times_keys,
    rows_times_keys,
    write_query_tiles,
)
from penstock.kernels.cpu_common.amx import ROWS, TILE
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.magnitude import largest_magnitude_bits
from penstock.kernels.cpu_common.simd import float_of_bits, load_wide, splat_wide, store, vmul
from penstock.kernels.kv_cache.cpu_blocks import SCALE_BYTES

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int8]
Longs = npt.NDArray[np.int64]

_LARGEST = np.float32(127 * 65536)
"""Largest integer that is split into digits."""

_SMALLEST = np.float32(2.0**-103)
"""Values are scaled as if the largest one of their row had at least this size, so that the scale is
a normal float32."""


@inner()
def digit_scale(values: Floats) -> tuple[Any, Any]:
    """Return the factor that scales the values to the range of `split_digits`, and its inverse.

    The inverse is NaN if a value is infinite or NaN.
    """
    most = largest_magnitude_bits(values)
    if most >= 0x7F800000:
        return np.float32(0), np.float32(np.nan)
    largest = max(float_of_bits(np.int64(most)), _SMALLEST)
    return _LARGEST / largest, largest / _LARGEST


@inner()
def load_scales(
    rows: Codes, starts: Longs, first: int, tile: tuple[int, int, int],
    kv_layout: tuple[int, int, int], head_dim: int, at: int, scales: Floats,
) -> None:  # fmt: skip
    """Write the scales of the positions of a work item to `scales`.

    Args:
        rows: the cache as a flat array.
        starts: where the key tiles begin.
        first: number of the first key tile.
        tile: see `attend_with_amx`.
        kv_layout: see `attend_with_amx`.
        head_dim: features per head.
        at: 0 for keys; for values, the index in `rows` at which the values begin.
        scales: the result, one per position.
    """
    block_size = kv_layout[2]
    lowest, highest = attended_tiles(tile)
    for i in range(len(scales) // ROWS):
        inside = 0
        if block_size > ROWS:
            inside = min(max(first + i, lowest), highest) % (block_size // ROWS) * ROWS
        page_scales = at + starts[i] + (block_size - inside) * head_dim
        store(scales, i * ROWS, load_f16_as_f32(rows, page_scales + inside * SCALE_BYTES))


@inner()
def split_queries(
    query: Any, start: int, num_rows: int, group: int, head: int, few: bool, splits: Floats,
    q: Floats, factors: Floats, inverses: Floats,
) -> None:  # fmt: skip
    """Write the digits of the query rows to tiles in `q`, with one column per query row.

    Few rows: [D / 64] tiles. More rows: [rows / 16, D / 64, 3] tiles. `splits` is scratch. The
    results of `digit_scale` are written to `factors` and `inverses`.
    """
    steps, apart = query.shape[2] // INT8_STEP, num_rows * ROWS if few else TILE
    for r in range(num_rows):
        x = query[start + r // group, head * group + r % group]
        factors[r], inverses[r] = digit_scale(x)
    for begin in range(0, num_rows, ROWS):
        for step in range(steps):
            for r in range(begin, min(begin + ROWS, num_rows)):
                x = query[start + r // group, head * group + r % group]
                split_digits(x, step * INT8_STEP, factors[r], splits, (r - begin) * ROWS, apart)
            write_query_tiles(splits, few, begin // ROWS * steps + step, q)


@inner()
def few_scores(
    rows: Codes, values_at: int, starts: Longs, head_dim: int, num_rows: int, q: Floats,
    found: Floats, scores: Floats, span: int,
) -> None:  # fmt: skip
    """Compute the sums of products of few query rows and the codes of all `span` positions.

    For `starts` see `prefetch_ahead`. `found` is scratch.
    """
    num_tiles = span // ROWS
    transposed = found[2 * CHUNK * TILE :]
    for begin in range(0, num_tiles, 2 * CHUNK):
        end = min(begin + 2 * CHUNK, num_tiles)
        few_rows_times_keys(rows, values_at, starts, begin, end, head_dim, q, found)
        for number in range(begin, end):
            transpose(found, (number - begin) * TILE, transposed, 0, ROWS)
            for r in range(num_rows):
                store(
                    scores, r * span + number * ROWS,
                    load_digits(transposed, r * ROWS, num_rows * ROWS),
                )  # fmt: skip


@inner()
def many_scores(
    rows: Codes, values_at: int, starts: Longs, head_dim: int, num_rows: int, q: Floats,
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
                transpose_digits(found, (number - begin) * SPLITS, scores, into, span)


@inner()
def multiply_scales(values: Floats, scales: Floats, factor: Any) -> None:
    """Multiply the values by `factor`, then by the scale of their position."""
    factors = splat_wide(factor)
    for s in range(0, len(values), ROWS):
        store(values, s, vmul(vmul(load_wide(values, s), factors), load_wide(scales, s)))
