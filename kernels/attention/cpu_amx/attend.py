"""Attention over a bfloat16 KV cache on CPUs with AMX; compiled by numba.

`cpu_paged` and the CPU step graph use these loops.

Scaled queries and softmax weights are float32. Each is split into three bfloat16 parts whose sum is
the float32, unless it is almost 0 (`cpu_common/amx`). The products with the keys and values in the
cache are therefore as exact as in float32. For each part, the products of 32 features or positions
are added in the fixed order of the instruction TDPBF16PS, then those of the next 32. The sums of
the three parts are then added.

A tile product has 16 rows and 16 columns, which are filled in two ways:

- few query rows (up to MAX_FEW_ROWS): the three parts of all query rows are in one tile;
- more query rows: a tile has one part of 16 query rows.

The sums are computed in the same order in both ways, and do not depend on other query rows, so the
results are bitwise identical. Infinite and NaN values are an exception: they may also reach query
rows of the same sequence that do not attend to them, because 0 * NaN is NaN.

Shapes: G query heads per KV head, D features per head. A query row is one token and query head.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import types

from penstock.kernels.attention.cpu_amx.intrinsics import write_features
from penstock.kernels.attention.cpu_amx.layout import (
    AHEAD,
    CHUNK,
    MAX_FEW_ROWS,
    SCORES,
    SPLITS,
    STEP,
    configure,
    find_starts,
)
from penstock.kernels.attention.cpu_amx.scores import (
    few_scores,
    many_scores,
    softmax,
    split_queries,
)
from penstock.kernels.attention.cpu_amx.values import add_values
from penstock.kernels.cpu_common.amx import ROWS, TILE, tilerelease
from penstock.kernels.cpu_common.amx_schedule import NUM_SPLITS
from penstock.kernels.cpu_common.cpu_features import has_amx
from penstock.kernels.cpu_common.late_codegen import inner, inner_overload

Floats = npt.NDArray[np.float32]
Halves = npt.NDArray[np.uint16]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]

FEATURES = 64
"""The number of features per head must be a multiple of this."""


@inner()
def count_starts(context: int) -> int:
    """Return the number of starts that `attend_with_amx` needs as scratch.

    `context` is the largest context length.
    """
    return context // ROWS + 4 + AHEAD


@inner()
def _attend(
    start: int, tile: tuple[int, int, int], kv_layout: tuple[int, int, int], query: Any,
    rows: Halves, values_at: int, table: Ints, scale: float, cap: float, sinks: Floats,
    slopes: Floats, scratch: Floats, all_starts: Longs, shapes: Any, out: Any,
    next_tile: tuple[int, int, int], next_layout: tuple[int, int, int], next_table: Ints,
) -> None:  # fmt: skip
    """Compute attention for a work item, see `attend_with_amx`."""
    count, context, behind = tile
    group, head_dim, num_rows = len(sinks), query.shape[2], count * len(sinks)
    few, low, high = num_rows <= MAX_FEW_ROWS, max(context - behind, 0), context + count - 1
    base = low // STEP * STEP
    span = (high - base + STEP - 1) // STEP * STEP
    num_tiles, size, head = span // ROWS, NUM_SPLITS * ROWS * head_dim, kv_layout[1]
    at = size * ((num_rows + ROWS - 1) // ROWS)
    q, sums, at = scratch[:at], scratch[at : 2 * at], 2 * at
    splits, at = scratch[at : at + SCORES], at + SCORES
    values, at = scratch[at : at + CHUNK * ROWS * head_dim], at + CHUNK * ROWS * head_dim
    tail, at = scratch[at : at + ROWS * head_dim].view(np.uint16), at + ROWS * head_dim
    scores = scratch[at:]
    ones, starts = scores[span * num_rows :], all_starts[: num_tiles + AHEAD]
    configure(num_rows, shapes)
    find_starts(base // ROWS, tile, kv_layout, table, head_dim, starts[:num_tiles])
    next_first = max(next_tile[1] - next_tile[2], 0) // STEP * 2
    find_starts(next_first, next_tile, next_layout, next_table, head_dim, starts[num_tiles:])
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
        for i in range(0, head_dim, STEP):
            write_features(sums, row_at, tile_step, split_step, ones[r], whole, i)
            row_at += 2 * tile_step


# The functions below do nothing for a cache of another format, and on a CPU without AMX. Their code
# is chosen when their caller is compiled, so that AMX loops are not compiled for other formats.


def _has_amx_loops(rows: Any) -> bool:
    """Return whether numba's type `rows` is a cache that these loops support."""
    return bool(rows.dtype == types.uint16) and has_amx()


def amx_scratch_size(rows: Any, num_rows: int, context: int, head_dim: int) -> int:
    """Return the number of float32 that `attend_with_amx` needs as scratch.

    Args:
        rows: the cache.
        num_rows: largest number of query rows of a work item.
        context: largest context length.
        head_dim: features per head.
    """
    raise NotImplementedError("amx_scratch_size can only be called from compiled code")


def attend_with_amx(
    start: int, tile: tuple[int, int, int], kv_layout: tuple[int, int, int], query: Any,
    rows: Any, values_at: int, table: Ints, scale: float, cap: float, sinks: Floats,
    slopes: Floats, scratch: Floats, starts: Longs, shapes: Any, out: Any,
    next_tile: tuple[int, int, int], next_layout: tuple[int, int, int], next_table: Ints,
) -> bool:  # fmt: skip
    """Compute attention for a work item, or return False if these loops do not support it.

    The arguments are those of `cpu_paged.attend_few_rows`, and in addition:

    Args:
        query: as there, with contiguous features.
        scratch: scratch array of `amx_scratch_size` elements that begins at a cache line.
        starts: scratch array of `count_starts` elements.
        shapes: 64 bytes, initially 0. After its last work item, the caller must call
            `release_amx`.
        next_tile: `tile` of the next work item, whose first keys are prefetched.
        next_layout: `kv_layout` of the next work item.
        next_table: block table of the next work item.
    """
    raise NotImplementedError("attend_with_amx can only be called from compiled code")


def release_amx(rows: Any) -> None:
    """Release the tile registers."""
    raise NotImplementedError("release_amx can only be called from compiled code")


@inner_overload(amx_scratch_size)
def _scratch_size_code(rows, num_rows, context, head_dim):
    def size(rows, num_rows, context, head_dim):
        padded = (num_rows + ROWS - 1) // ROWS * ROWS
        return (
            2 * NUM_SPLITS * padded * head_dim + SCORES + (CHUNK + 1) * ROWS * head_dim
            + (padded + 1) * (context + 2 * STEP)
        )  # fmt: skip

    return size if _has_amx_loops(rows) else lambda rows, num_rows, context, head_dim: 0


@inner_overload(attend_with_amx)
def _attend_code(
    start, tile, kv_layout, query, rows, values_at, table, scale, cap, sinks, slopes, scratch,
    starts, shapes, out, next_tile, next_layout, next_table,
):  # fmt: skip
    def attend(
        start, tile, kv_layout, query, rows, values_at, table, scale, cap, sinks, slopes, scratch,
        starts, shapes, out, next_tile, next_layout, next_table,
    ):  # fmt: skip
        if query.shape[2] % FEATURES or kv_layout[2] % ROWS:
            return False
        _attend(
            start, tile, kv_layout, query, rows, values_at, table, scale, cap, sinks, slopes,
            scratch, starts, shapes, out, next_tile, next_layout, next_table,
        )  # fmt: skip
        return True

    def nothing(
        start, tile, kv_layout, query, rows, values_at, table, scale, cap, sinks, slopes, scratch,
        starts, shapes, out, next_tile, next_layout, next_table,
    ):  # fmt: skip
        return False

    return attend if _has_amx_loops(rows) else nothing


@inner_overload(release_amx)
def _release_code(rows):
    return (lambda rows: tilerelease()) if _has_amx_loops(rows) else (lambda rows: None)
