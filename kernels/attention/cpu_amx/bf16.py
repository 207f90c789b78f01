"""Attention over a bfloat16 KV cache on CPUs with AMX; compiled by numba.

Scaled queries and softmax weights are float32. Each is split into three bfloat16 values whose sum
is the float32, unless it is almost 0 (`cpu_common/amx`). The products with the keys and values in
the cache are therefore as exact as in float32. For each split, the products of 32 features or
positions are added in the fixed order of the instruction TDPBF16PS, then those of the next 32. The
sums of the three splits are then added.

Infinite and NaN values may also reach query rows of the same sequence that do not attend to them,
because 0 * NaN is NaN.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.cpu_amx.bf16_scores import (
    few_scores,
    many_scores,
    split_queries,
)
from penstock.kernels.attention.cpu_amx.bf16_values import add_values
from penstock.kernels.attention.cpu_amx.intrinsics import write_features
from penstock.kernels.attention.cpu_amx.layout import (
    AHEAD,
    BF16_STEP,
    CHUNK,
    MAX_FEW_ROWS,
    SCORES,
    SPLITS,
    configure,
    find_starts,
)
from penstock.kernels.attention.cpu_amx.softmax import softmax
from penstock.kernels.cpu_common.amx import ROWS, TILE
from penstock.kernels.cpu_common.amx_schedule import NUM_SPLITS
from penstock.kernels.cpu_common.late_codegen import inner

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@inner()
def bf16_scratch_size(num_rows: int, context: int, head_dim: int) -> int:
    """Return the number of float32 that `attend_bf16` needs as scratch, see `amx_scratch_size`."""
    padded = (num_rows + ROWS - 1) // ROWS * ROWS
    return (
        2 * NUM_SPLITS * padded * head_dim + SCORES + (CHUNK + 1) * ROWS * head_dim
        + (padded + 1) * (context + 2 * BF16_STEP)
    )  # fmt: skip


@inner()
def attend_bf16(
    start: int, tile: tuple[int, int, int], kv_layout: tuple[int, int, int], query: Any,
    rows: Halves, values_at: int, table: Ints, scale: float, cap: float, sinks: Floats,
    slopes: Floats, scratch: Floats, all_starts: Longs, shapes: Any, out: Any,
    next_tile: tuple[int, int, int], next_layout: tuple[int, int, int], next_table: Ints,
) -> None:  # fmt: skip
    """Compute attention for a work item over a bfloat16 cache, see `attend_with_amx`."""
    count, context, behind = tile
    group, head_dim, num_rows = len(sinks), query.shape[2], count * len(sinks)
    few, low, high = num_rows <= MAX_FEW_ROWS, max(context - behind, 0), context + count - 1
    base = low // BF16_STEP * BF16_STEP
    span = (high - base + BF16_STEP - 1) // BF16_STEP * BF16_STEP
    num_tiles, size, head = span // ROWS, NUM_SPLITS * ROWS * head_dim, kv_layout[1]
    at = size * ((num_rows + ROWS - 1) // ROWS)
    q, sums, at = scratch[:at], scratch[at : 2 * at], 2 * at
    splits, at = scratch[at : at + SCORES], at + SCORES
    values, at = scratch[at : at + CHUNK * ROWS * head_dim], at + CHUNK * ROWS * head_dim
    tail, at = scratch[at : at + ROWS * head_dim].view(np.uint16), at + ROWS * head_dim
    scores = scratch[at:]
    ones, starts = scores[span * num_rows :], all_starts[: num_tiles + AHEAD]
    configure(num_rows, shapes)
    find_starts(base // ROWS, tile, kv_layout, rows, table, head_dim, starts[:num_tiles])
    next_first = max(next_tile[1] - next_tile[2], 0) // BF16_STEP * 2
    find_starts(next_first, next_tile, next_layout, rows, next_table, head_dim, starts[num_tiles:])
    split_queries(query, start, num_rows, group, head, scale, few, splits, q)
    if few:
        few_scores(rows, values_at, starts, head_dim, num_rows, q, splits, scores, span)
    else:
        many_scores(rows, values_at, starts, head_dim, num_rows, q, splits, scores, span)
    for r in range(num_rows):
        seen, g = context + r // group, r % group
        first_seen, row = max(seen - behind, 0) - base, scores[r * span : (r + 1) * span]
        ones[r] = softmax(row, first_seen, seen - base, cap, slopes[g], sinks[g])
    add_values(
        rows, values_at, starts, head_dim, low - base, high - base, num_rows, few, scores, span,
        splits, values, tail, sums,
    )  # fmt: skip
    for r in range(num_rows):
        whole = out[start + r // group, head * group + r % group]
        row_at, tile_step, split_step = r * ROWS, TILE, num_rows * ROWS
        if not few:
            row_at, tile_step, split_step = r // ROWS * size + r % ROWS * ROWS, SPLITS, TILE
        for i in range(0, head_dim, BF16_STEP):
            write_features(sums, row_at, tile_step, split_step, ones[r], whole, i)
            row_at += 2 * tile_step
