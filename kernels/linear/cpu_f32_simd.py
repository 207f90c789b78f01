"""AVX2 and AVX-512 loops of `cpu_packed_f32`, compiled by numba.

Shapes: T rows of x, K inputs, N outputs, P panels of PANEL outputs.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import entry, load_entries, run_serial_or_parallel
from penstock.kernels.cpu_common.simd import (
    VECTOR_WIDTH,
    broadcast_load,
    fma,
    load_wide,
    prefetch,
    splat_wide,
    store,
    vadd,
)
from penstock.kernels.linear.panels import PANEL

Floats = npt.NDArray[np.float32]

TILE_ROWS = VECTOR_WIDTH // 2
"""Number of rows of a tile. The sums of a tile, which has one panel of columns, the weights of one
input in the panel, and one element of x fill the vector registers."""

BLOCK_K = 192
"""Number of inputs per partial sum. The weights of these inputs in a panel stay in the cache while
all tiles of rows use them."""

_BLOCK_ROWS = 64
"""Number of rows that are multiplied by all panels before the next rows (loop tiling)."""

_PREFETCH_EVERY, _PREFETCH_OFTEN = 64, 16
"""Number of inputs that a tile of four rows multiplies between two groups of prefetches. The second
number is for few rows: they share the prefetches of a panel, so each group has more lines."""

_LINE = 16  # number of float32 in a cache line


@inner()
def _load_panel(panels: Floats, at: int) -> Any:
    return (
        load_wide(panels, at),
        load_wide(panels, at + VECTOR_WIDTH),
        load_wide(panels, at + 2 * VECTOR_WIDTH),
    )


@inner()
def _zero_sums() -> Any:
    none = splat_wide(np.float32(0))
    return none, none, none


@inner()
def _fma_panel(sums: Any, x: Any, columns: Any) -> Any:
    a, b, c = sums
    p, q, r = columns
    return fma(x, p, a), fma(x, q, b), fma(x, r, c)


@inner()
def _fma_rows(
    s0: Any, s1: Any, s2: Any, s3: Any, x: Floats, x0: int, x1: int, x2: int, x3: int, columns: Any
) -> Any:  # fmt: skip
    """Return the sums of four rows plus `columns` times one element of x per row."""
    return (
        _fma_panel(s0, broadcast_load(x, x0), columns),
        _fma_panel(s1, broadcast_load(x, x1), columns),
        _fma_panel(s2, broadcast_load(x, x2), columns),
        _fma_panel(s3, broadcast_load(x, x3), columns),
    )


@inner()
def _store_sums(y: Floats, at: int, sums: Any, before: Floats, before_at: int) -> None:
    """Store `before` + `sums` to y from index `at` on, for one row and the columns of one panel."""
    a, b, c = sums
    p, q, r = _load_panel(before, before_at)
    store(y, at, vadd(p, a))
    store(y, at + VECTOR_WIDTH, vadd(q, b))
    store(y, at + 2 * VECTOR_WIDTH, vadd(r, c))


@inner()
def sum_chunk(
    x: Floats, begin: int, end: int, panels: Floats, at: int, before: Floats, y: Floats, column: int
) -> None:  # fmt: skip
    """Multiply inputs [begin, end) of one row by the panel at `at`; store `before` + sums to y."""
    sums = _zero_sums()
    for k in range(begin, end):
        sums = _fma_panel(sums, broadcast_load(x, k), _load_panel(panels, at + k * PANEL))
    _store_sums(y, column, sums, before, column)


@inner()
def _sum_four_chunks(
    x: Floats, begin: int, end: int, panels: Floats, at: int, step: int, before: Floats, y: Floats,
    column: int,
) -> None:  # fmt: skip
    """Multiply inputs [begin, end) of one row by four panels; store `before` + sums to y.

    The first panel begins at index `at`, and the panels are `step` apart. Reading four panels at
    once reaches a higher memory bandwidth than reading one panel.
    """
    s0 = s1 = s2 = s3 = _zero_sums()
    for k in range(begin, end):
        value, v = broadcast_load(x, k), at + k * PANEL
        s0, s1 = (
            _fma_panel(s0, value, _load_panel(panels, v)),
            _fma_panel(s1, value, _load_panel(panels, v + step)),
        )
        v += 2 * step
        s2, s3 = (
            _fma_panel(s2, value, _load_panel(panels, v)),
            _fma_panel(s3, value, _load_panel(panels, v + step)),
        )
    _store_sums(y, column, s0, before, column)
    _store_sums(y, column + PANEL, s1, before, column + PANEL)
    _store_sums(y, column + 2 * PANEL, s2, before, column + 2 * PANEL)
    _store_sums(y, column + 3 * PANEL, s3, before, column + 3 * PANEL)


@inner()
def _one_row(
    x: Floats, num_inputs: int, panels: Floats, bias: Floats, first: int, last: int, y: Floats
) -> None:
    """Do the work of `_whole_panels` for a single row of x."""
    size, four = num_inputs * PANEL, first + (last - first) // 4 * 4
    bias = bias[first * PANEL :]
    for begin in range(0, num_inputs, BLOCK_K):
        end, before = min(begin + BLOCK_K, num_inputs), bias if begin == 0 else y
        for panel in range(first, four, 4):
            column = (panel - first) * PANEL
            _sum_four_chunks(x, begin, end, panels, panel * size, size, before, y, column)
        for panel in range(four, last):
            sum_chunk(x, begin, end, panels, panel * size, before, y, (panel - first) * PANEL)


@inner()
def _tile_of_8(
    x: Floats, x_at: int, x_step: int, count: int, panels: Floats, at: int, ahead: int, lines: int,
    before: Floats, before_at: int, before_step: int, y: Floats, y_at: int, y_step: int,
) -> None:  # fmt: skip
    """Multiply `count` inputs of eight rows by the panel at `at`; store `before` + sums to y.

    Between the multiplications, the loop prefetches `lines` cache lines from `panels[ahead]` on.
    The prefetches are spread evenly over the inputs.
    """
    x1, x2, x3, x4 = x_at + x_step, x_at + 2 * x_step, x_at + 3 * x_step, x_at + 4 * x_step
    x5, x6, x7 = x_at + 5 * x_step, x_at + 6 * x_step, x_at + 7 * x_step
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = _zero_sums()
    pace, at_once, due = max(1, count // lines), (lines + count - 1) // count, 0
    for k in range(count):
        if k == due:
            for _ in range(at_once):
                prefetch(panels, ahead)
                ahead += _LINE
            due += pace
        columns = _load_panel(panels, at + k * PANEL)
        s0, s1, s2, s3 = _fma_rows(s0, s1, s2, s3, x, x_at + k, x1 + k, x2 + k, x3 + k, columns)
        s4, s5, s6, s7 = _fma_rows(s4, s5, s6, s7, x, x4 + k, x5 + k, x6 + k, x7 + k, columns)
    _store_sums(y, y_at, s0, before, before_at)
    _store_sums(y, y_at + y_step, s1, before, before_at + before_step)
    _store_sums(y, y_at + 2 * y_step, s2, before, before_at + 2 * before_step)
    _store_sums(y, y_at + 3 * y_step, s3, before, before_at + 3 * before_step)
    _store_sums(y, y_at + 4 * y_step, s4, before, before_at + 4 * before_step)
    _store_sums(y, y_at + 5 * y_step, s5, before, before_at + 5 * before_step)
    _store_sums(y, y_at + 6 * y_step, s6, before, before_at + 6 * before_step)
    _store_sums(y, y_at + 7 * y_step, s7, before, before_at + 7 * before_step)


@inner()
def _tile_of_4(
    x: Floats, x_at: int, x_step: int, count: int, panels: Floats, at: int, ahead: int, lines: int,
    before: Floats, before_at: int, before_step: int, y: Floats, y_at: int, y_step: int,
) -> None:  # fmt: skip
    """Do the work of `_tile_of_8` for four rows."""
    x1, x2, x3 = x_at + x_step, x_at + 2 * x_step, x_at + 3 * x_step
    s0 = s1 = s2 = s3 = _zero_sums()
    every = min(count, _PREFETCH_EVERY if 2 * lines < count else _PREFETCH_OFTEN)
    at_once = -(-lines * every // count)
    for begin in range(0, count, every):
        for _ in range(at_once):
            prefetch(panels, ahead)
            ahead += _LINE
        for k in range(begin, min(begin + every, count)):
            columns = _load_panel(panels, at + k * PANEL)
            s0, s1, s2, s3 = _fma_rows(s0, s1, s2, s3, x, x_at + k, x1 + k, x2 + k, x3 + k, columns)
    _store_sums(y, y_at, s0, before, before_at)
    _store_sums(y, y_at + y_step, s1, before, before_at + before_step)
    _store_sums(y, y_at + 2 * y_step, s2, before, before_at + 2 * before_step)
    _store_sums(y, y_at + 3 * y_step, s3, before, before_at + 3 * before_step)


tile: Any = _tile_of_8 if TILE_ROWS == 8 else _tile_of_4


@inner()
def _add_scaled(y: Floats, at: int, sums: Any, scales: Floats, scales_at: int) -> None:
    """Add `sums * scales` to y from index `at` on, for one row and the columns of one panel."""
    a, b, c = sums
    p, q, r = _load_panel(scales, scales_at)
    store(y, at, fma(a, p, load_wide(y, at)))
    store(y, at + VECTOR_WIDTH, fma(b, q, load_wide(y, at + VECTOR_WIDTH)))
    store(y, at + 2 * VECTOR_WIDTH, fma(c, r, load_wide(y, at + 2 * VECTOR_WIDTH)))


@inner()
def add_scaled_tile(
    x: Floats, x_at: int, x_step: int, num_rows: int, count: int, values: Floats, scales: Floats,
    scales_at: int, y: Floats, y_at: int, y_step: int,
) -> None:  # fmt: skip
    """Multiply `count` inputs of at most four rows by `values`, then by scales; add this to y.

    Args:
        num_rows: number of rows of x, 1 to 4.
        values: [count, PANEL].
        scales: the PANEL scales begin at index `scales_at`.
    """
    last = num_rows - 1
    x1, x2, x3 = (
        x_at + min(1, last) * x_step, x_at + min(2, last) * x_step, x_at + min(3, last) * x_step
    )  # fmt: skip
    s0 = s1 = s2 = s3 = _zero_sums()
    for k in range(count):
        columns = _load_panel(values, k * PANEL)
        s0, s1, s2, s3 = _fma_rows(s0, s1, s2, s3, x, x_at + k, x1 + k, x2 + k, x3 + k, columns)
    _add_scaled(y, y_at, s0, scales, scales_at)
    if num_rows > 1:
        _add_scaled(y, y_at + y_step, s1, scales, scales_at)
    if num_rows > 2:
        _add_scaled(y, y_at + 2 * y_step, s2, scales, scales_at)
    if num_rows > 3:
        _add_scaled(y, y_at + 3 * y_step, s3, scales, scales_at)


@inner()
def copy_panel(
    given: Floats, at: int, step: int, count: int, out: Floats, out_at: int, out_step: int
) -> None:
    """Copy `count` rows of PANEL elements from `given` to `out`.

    Rows are `step` elements apart in `given`, and `out_step` elements in `out`.
    """
    for r in range(count):
        for c in range(0, PANEL, VECTOR_WIDTH):
            store(out, out_at + r * out_step + c, load_wide(given, at + r * step + c))


@inner()
def _multiply_panels(
    x: Floats, num_rows: int, num_inputs: int, panels: Floats, bias: Floats, first: int, last: int,
    y: Floats, width: int, sums: Floats,
) -> None:  # fmt: skip
    """Compute the outputs of panels [first, last) for more than one row; see `_whole_panels`.

    `sums` is a contiguous scratch array for the sums of one panel. Sums are not accumulated in y,
    because rows of y that are a power of two apart would compete for a few sets of the cache.
    """
    for floor in range(0, num_rows, _BLOCK_ROWS):
        top = min(floor + _BLOCK_ROWS, num_rows)
        lines = -(-BLOCK_K * PANEL // _LINE * TILE_ROWS // (top - floor))
        for panel in range(first, last):
            for begin in range(0, num_inputs, BLOCK_K):
                count = min(BLOCK_K, num_inputs - begin)
                at = (panel * num_inputs + begin) * PANEL
                before, step = (bias[panel * PANEL :], 0) if begin == 0 else (sums, PANEL)
                for r in range(0, top - floor, TILE_ROWS):
                    ahead = at + count * PANEL + r // TILE_ROWS * lines * _LINE
                    tile(
                        x, (floor + r) * num_inputs + begin, num_inputs, count, panels, at, ahead,
                        lines, before, r * step, step, sums, r * PANEL, PANEL,
                    )  # fmt: skip
            column = (panel - first) * PANEL
            copy_panel(sums, 0, PANEL, top - floor, y, floor * width + column, width)


@inner(allocates=True)
def _whole_panels(
    x: Floats, num_rows: int, num_inputs: int, panels: Floats, bias: Floats, first: int, last: int,
    y: Floats, width: int,
) -> None:  # fmt: skip
    """Compute the outputs of panels [first, last) and store them from column 0 of y on.

    y is [num_rows, width].
    """
    if num_rows == 1:
        _one_row(x, num_inputs, panels, bias, first, last, y)
        return
    sums = np.empty(min(num_rows, _BLOCK_ROWS) * PANEL, np.float32)
    _multiply_panels(x, num_rows, num_inputs, panels, bias, first, last, y, width, sums)


@inner(allocates=True)
def compute_columns(
    x: Floats, num_rows: int, num_inputs: int, panels: Floats, bias: Floats, y: Floats,
    num_outputs: int, first: int, last: int,
) -> None:  # fmt: skip
    """Compute the columns of panels [first, last) of y [num_rows, num_outputs].

    If the last panel has fewer outputs than columns, it is computed into a temporary array.
    """
    whole = min(last, num_outputs // PANEL)
    if first < whole:
        left = y[first * PANEL :]
        _whole_panels(x, num_rows, num_inputs, panels, bias, first, whole, left, num_outputs)
    if max(first, whole) < last:
        spare = np.empty(num_rows * PANEL, np.float32)
        _whole_panels(x, num_rows, num_inputs, panels, bias, last - 1, last, spare, PANEL)
        column = (last - 1) * PANEL
        for r in range(num_rows):
            for c in range(num_outputs - column):
                y[r * num_outputs + column + c] = spare[r * PANEL + c]


_SIGNATURE = "void(float32[::1], int64, int64, float32[::1], float32[::1], float32[::1], int64"


@entry(_SIGNATURE + ")")
def _serial(
    x: Floats,  # [T * K]
    num_rows: int,  # number of rows of x: 1, or a multiple of TILE_ROWS
    num_inputs: int,
    panels: Floats,  # [P * K * PANEL]
    bias: Floats,  # [at least P * PANEL]
    y: Floats,  # [T * N]
    num_outputs: int,
) -> None:
    """Compute the linear layer's output y in one thread."""
    last = -(-num_outputs // PANEL)
    compute_columns(x, num_rows, num_inputs, panels, bias, y, num_outputs, 0, last)


@entry(_SIGNATURE + ", int64)", parallel=True)
def _parallel(
    x: Floats, num_rows: int, num_inputs: int, panels: Floats, bias: Floats, y: Floats,
    num_outputs: int, num_threads: int,
) -> None:  # fmt: skip
    """Compute y with several threads.

    Each thread computes a range of panels or, if there are many rows, a range of rows. With many
    rows, dividing the rows balances the threads better than dividing the panels.
    """
    num_panels, floors = -(-num_outputs // PANEL), num_rows // _BLOCK_ROWS
    for thread in numba.prange(num_threads):
        if floors < 2 * num_threads:
            first = num_panels * thread // num_threads
            last = num_panels * (thread + 1) // num_threads
            compute_columns(x, num_rows, num_inputs, panels, bias, y, num_outputs, first, last)
        else:
            begin = floors * thread // num_threads * _BLOCK_ROWS
            end = floors * (thread + 1) // num_threads * _BLOCK_ROWS
            if thread == num_threads - 1:
                end = num_rows
            compute_columns(
                x[begin * num_inputs :], end - begin, num_inputs, panels, bias,
                y[begin * num_outputs :], num_outputs, 0, num_panels,
            )  # fmt: skip


def padded_sizes(num_rows: int, num_outputs: int) -> tuple[int, int, int]:
    """Return the number of rows of x that are read, and the padded rows and columns of y."""
    rows = num_rows if num_rows == 1 else -(-num_rows // TILE_ROWS) * TILE_ROWS
    return rows, rows, num_outputs


def load() -> None:
    """Compile the loops, or load them from the cache on disk."""
    load_entries(_serial, _parallel)


def run(*given: Any, num_threads: int) -> None:
    """Compute the linear layer's output y. `given` are the arguments of `_serial`."""
    run_serial_or_parallel(_serial, _parallel, *given, num_threads=num_threads)
