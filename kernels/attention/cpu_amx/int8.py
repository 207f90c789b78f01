"""Attention over an INT8 KV cache on CPUs with AMX; compiled by numba.

A cached feature is a code times the scale of its position (`kv_cache/format`). AMX multiplies codes
by digits: a query row, or a row of softmax weights times the scales of the values, is rounded to
integers of 24 bits with one scale per row, and each integer is split into three digits of 8 bits.
The sums of the products of one digit are exact (instruction TDPBSSD). The rounding error of each
value of a row is about 2^-24 of the largest value of this row, and the errors of all features or
positions add up. A weight below 2^-24 of the largest one counts as 0.

Shapes: D features per head. A query row is one token and query head.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.cpu_amx.int8_scores import (
    digit_scale,
    few_scores,
    load_scales,
    many_scores,
    multiply_scales,
    split_queries,
)
from penstock.kernels.attention.cpu_amx.int8_values import add_values
from penstock.kernels.attention.cpu_amx.layout import (
    AHEAD,
    CHUNK,
    INT8_STEP,
    MAX_FEW_ROWS,
    SCORES,
    configure,
    find_starts,
)
from penstock.kernels.attention.cpu_amx.softmax import softmax
from penstock.kernels.cpu_common.amx import ROWS
from penstock.kernels.cpu_common.amx_schedule import NUM_SPLITS
from penstock.kernels.cpu_common.late_codegen import inner

Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.int8]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@inner()
def int8_scratch_size(num_rows: int, context: int, head_dim: int) -> int:
    """Return the number of float32 that `attend_int8` needs as scratch, see `amx_scratch_size`."""
    padded = (num_rows + ROWS - 1) // ROWS * ROWS
    return (
        (2 * NUM_SPLITS + 1) * padded * head_dim + SCORES + CHUNK * ROWS * head_dim + 3 * padded
        + (padded + 2) * (context + 2 * INT8_STEP)
    )  # fmt: skip


@inner()
def attend_int8(
    start: int, tile: tuple[int, int, int], kv_layout: tuple[int, int, int], query: Any,
    rows: Codes, values_at: int, table: Ints, scale: float, cap: float, sinks: Floats,
    slopes: Floats, scratch: Floats, all_starts: Longs, shapes: Any, out: Any,
    next_tile: tuple[int, int, int], next_layout: tuple[int, int, int], next_table: Ints,
) -> None:  # fmt: skip
    """Compute attention for a work item over an INT8 cache, see `attend_with_amx`."""
    count, context, behind = tile
    group, head_dim, num_rows = len(sinks), query.shape[2], count * len(sinks)
    few, low, high = num_rows <= MAX_FEW_ROWS, max(context - behind, 0), context + count - 1
    base, head = low // INT8_STEP * INT8_STEP, kv_layout[1]
    span = (high - base + INT8_STEP - 1) // INT8_STEP * INT8_STEP
    num_tiles, padded = span // ROWS, (num_rows + ROWS - 1) // ROWS * ROWS
    at = NUM_SPLITS * padded * head_dim
    q, sums, at = scratch[:at], scratch[at : 2 * at], 2 * at
    splits, at = scratch[at : at + SCORES], at + SCORES
    values, at = scratch[at : at + CHUNK * ROWS * head_dim], at + CHUNK * ROWS * head_dim
    totals, at = scratch[at : at + padded * head_dim], at + padded * head_dim
    scales, at = scratch[at : at + span], at + span
    factors, at = scratch[at : at + padded], at + padded
    inverses, at = scratch[at : at + padded], at + padded
    ones, scores = scratch[at : at + padded], scratch[at + padded :]
    starts = all_starts[: num_tiles + AHEAD]
    configure(num_rows, shapes)
    find_starts(base // ROWS, tile, kv_layout, rows, table, head_dim, starts[:num_tiles])
    next_first = max(next_tile[1] - next_tile[2], 0) // INT8_STEP * (INT8_STEP // ROWS)
    find_starts(next_first, next_tile, next_layout, rows, next_table, head_dim, starts[num_tiles:])
    split_queries(query, start, num_rows, group, head, few, splits, q, factors, inverses)
    if few:
        few_scores(rows, values_at, starts, head_dim, num_rows, q, splits, scores, span)
    else:
        many_scores(rows, values_at, starts, head_dim, num_rows, q, splits, scores, span)
    load_scales(rows, starts, base // ROWS, tile, kv_layout, head_dim, 0, scales)
    for r in range(num_rows):
        seen, g, row = context + r // group, r % group, scores[r * span : (r + 1) * span]
        first_seen = max(seen - behind, 0) - base
        multiply_scales(row, scales, inverses[r] * scale)
        ones[r] = softmax(row, first_seen, seen - base, cap, slopes[g], sinks[g])
    load_scales(rows, starts, base // ROWS, tile, kv_layout, head_dim, values_at, scales)
    for r in range(num_rows):
        seen, row = context + r // group, scores[r * span : (r + 1) * span]
        multiply_scales(row, scales, np.float32(1))
        row[: max(seen - behind, 0) - base] = 0  # other positions may have any scale
        row[seen - base :] = 0
        factors[r], inverses[r] = digit_scale(row)
    add_values(
        rows, values_at, starts, base // INT8_STEP, head_dim, num_rows, few, scores, span, factors,
        splits, values, sums, totals,
    )  # fmt: skip
    for r in range(num_rows):
        whole, factor = out[start + r // group, head * group + r % group], inverses[r] * ones[r]
        for i in range(head_dim):
            whole[i] = totals[r * head_dim + i] * factor
