"""Attention over a bfloat16 or INT8 KV cache on CPUs with AMX; compiled by numba.

`cpu_paged` and the CPU step graph use these loops. Queries and softmax weights are float32, and
each is split into three values with 8 bits of precision: bfloat16 values over a bfloat16 cache
(`cpu_amx/bf16`), and int8 values over an INT8 cache (`cpu_amx/int8`).

A tile product has 16 rows and 16 columns, which are filled in two ways:

- few query rows (up to MAX_FEW_ROWS): the three splits of all query rows are in one tile;
- more query rows: a tile has one split of 16 query rows.

The sums are computed in the same order in both ways, and do not depend on other query rows, so the
results are bitwise identical.

Shapes: G query heads per KV head, D features per head. A query row is one token and query head.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import types
from numba.np.numpy_support import as_dtype

from penstock.kernels.attention.cpu_amx.bf16 import attend_bf16, bf16_scratch_size
from penstock.kernels.attention.cpu_amx.int8 import attend_int8, int8_scratch_size
from penstock.kernels.attention.cpu_amx.layout import AHEAD
from penstock.kernels.attention.cpu_amx.support import FEATURES, POSITIONS, has_amx_loops
from penstock.kernels.cpu_common.amx import ROWS, tilerelease
from penstock.kernels.cpu_common.late_codegen import inner, inner_overload

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]


@inner()
def count_starts(context: int) -> int:
    """Return the number of starts that `attend_with_amx` needs as scratch.

    `context` is the largest context length.
    """
    return context // ROWS + 8 + AHEAD


# The functions below do nothing for a cache of another format, and on a CPU without AMX. Their code
# is chosen when their caller is compiled, so that AMX loops are not compiled for other formats.


def _has_amx_loops(rows: Any) -> bool:
    """Return whether numba's type `rows` is a cache that these loops support."""
    return has_amx_loops(as_dtype(rows.dtype))


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
    def bf16(rows, num_rows, context, head_dim):
        return bf16_scratch_size(num_rows, context, head_dim)

    def int8(rows, num_rows, context, head_dim):
        return int8_scratch_size(num_rows, context, head_dim)

    if not _has_amx_loops(rows):
        return lambda rows, num_rows, context, head_dim: 0
    return int8 if rows.dtype == types.int8 else bf16


@inner_overload(attend_with_amx)
def _attend_code(
    start, tile, kv_layout, query, rows, values_at, table, scale, cap, sinks, slopes, scratch,
    starts, shapes, out, next_tile, next_layout, next_table,
):  # fmt: skip
    work = attend_int8 if rows.dtype == types.int8 else attend_bf16

    def attend(
        start, tile, kv_layout, query, rows, values_at, table, scale, cap, sinks, slopes, scratch,
        starts, shapes, out, next_tile, next_layout, next_table,
    ):  # fmt: skip
        if query.shape[2] % FEATURES or kv_layout[2] % POSITIONS:
            return False
        work(
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
