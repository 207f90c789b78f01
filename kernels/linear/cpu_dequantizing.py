"""AVX2 and AVX-512 loops of `quantized`, compiled by numba.

Shapes: T rows of x, K inputs, P panels of PANEL outputs, G groups of inputs.

A tile is one panel of outputs and 1, 2, 4, 6 or 8 rows of x (1, 2 or 4 with AVX2). `cpu_code_tiles`
converts codes in registers and multiplies each converted vector by all rows of the tile. The codes
are therefore read from memory once, and converted once per tile, at the same time as the
multiplications. With AVX2 and more rows than one tile has, a block of codes is first converted to
float32 in memory, which all tiles then read.

An output element starts as its bias. The inputs are divided into blocks of `BLOCK_K`, and each
block into runs. In a run of inputs of one group, products are summed in order, and the sum is
multiplied by the scale. In a run of several short groups (act-order), each weight is multiplied by
its scale first. The sums of the runs are added one after another. The division into runs depends
only on the groups, so an element is bitwise identical for any number of rows, columns and threads.
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
)
from penstock.kernels.linear import code_tables
from penstock.kernels.linear.code_kinds import E2M1, FP8, INT4, INT8
from penstock.kernels.linear.cpu_code_tiles import (
    BLOCK_K,
    TILE_ROWS,
    convert_group,
    convert_scattered,
    multiply_group,
    multiply_scattered,
    step_inputs,
)
from penstock.kernels.linear.cpu_f32_simd import add_scaled_tile, copy_panel
from penstock.kernels.linear.panels import PANEL

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]

_BLOCK_ROWS = 64
"""Number of rows that are multiplied by all panels before the next rows (loop tiling)."""

_CONVERTS_ONCE = VECTOR_WIDTH == 8
"""Whether several tiles of rows share the converted values of a panel. With AVX2, a tile has only
four rows, so a conversion per tile would take longer than the multiplications."""

_TABLES = np.array([code_tables.E2M1, code_tables.NF4, code_tables.FP4], np.float32).ravel()
"""Values of the 16 codes of the kind E2M1, then of NF4, then of FP4."""


def _tile_loop(kind: int) -> Any:
    """Compile the loop over the runs of a block, for one kind of codes.

    All kinds of codes with a table of values share one loop, compiled for E2M1.
    """
    group, scattered, step = multiply_group(kind), multiply_scattered(kind), step_inputs(kind)
    group_values, scattered_values = convert_group(kind), convert_scattered(kind)

    @inner()
    def end_of_group(groups: Ints, k: int, end: int) -> int:
        """Return the end of the inputs from k on that have the same group.

        The result is at most `end`, and is rounded down to a multiple of `step`.
        """
        stop = int(groups[len(groups) // 2 + k])
        return (stop if stop < end else end) // step * step

    @inner()
    def end_of_scattered(groups: Ints, k: int, end: int) -> int:
        """Return the end of the inputs from k on that `end_of_group` puts in no group."""
        stop = min(k + step, end)
        while stop < end and end_of_group(groups, stop, end) <= stop:
            stop = min(stop + step, end)
        return stop

    @inner()
    def multiply(
        x: Floats, x_at: int, x_step: int, count: int, begin: int, end: int, codes: Bytes,
        codes_at: int, scales: Floats, zeros: Bytes, groups: Ints, groups_at: int, table_at: int,
        sums: Floats,
    ) -> None:  # fmt: skip
        """Add the products of inputs [begin, end) to sums [TILE_ROWS, PANEL]."""
        k = begin
        while k < end:
            stop = end_of_group(groups, k, end)
            if stop > k:
                group(
                    x, x_at, x_step, count, k, stop, codes, codes_at, scales, zeros, groups,
                    groups_at, _TABLES, table_at, sums,
                )  # fmt: skip
            else:
                stop = end_of_scattered(groups, k, end)
                scattered(
                    x, x_at, x_step, count, k, stop, codes, codes_at, scales, zeros, groups,
                    groups_at, _TABLES, table_at, sums,
                )  # fmt: skip
            k = stop

    @inner()
    def convert(
        begin: int, end: int, codes: Bytes, codes_at: int, scales: Floats, zeros: Bytes,
        groups: Ints, groups_at: int, table_at: int, values: Floats,
    ) -> tuple[int, int]:  # fmt: skip
        """Convert the codes of the run of inputs that begins at `begin`.

        Args:
            values: result [end - begin, PANEL]; the inputs after the run are arbitrary.

        Returns:
            The end of the run, and the index of its scales. The index is -1 if the values are
            already multiplied by their scales.
        """
        stop = end_of_group(groups, begin, end)
        if stop > begin:
            group_values(
                scales, 0, 0, 1, begin, stop, codes, codes_at, scales, zeros, groups, groups_at,
                _TABLES, table_at, values,
            )  # fmt: skip
            return stop, groups_at + groups[begin] * PANEL
        stop = end_of_scattered(groups, begin, end)
        scattered_values(
            scales, 0, 0, 1, begin, stop, codes, codes_at, scales, zeros, groups, groups_at,
            _TABLES, table_at, values,
        )  # fmt: skip
        return stop, -1

    return multiply, convert


_multiply_int4, _convert_int4 = _tile_loop(INT4)
_multiply_int8, _convert_int8 = _tile_loop(INT8)
_multiply_fp8, _convert_fp8 = _tile_loop(FP8)
_multiply_table, _convert_table = _tile_loop(E2M1)


@inner()
def _multiply(
    kind: int, x: Floats, x_at: int, x_step: int, count: int, begin: int, end: int, codes: Bytes,
    panel: int, scales: Floats, zeros: Bytes, groups: Ints, num_panels: int, sums: Floats,
) -> None:  # fmt: skip
    """Add the products of inputs [begin, end) to the `sums` of one tile.

    The tile is `count` rows (at most TILE_ROWS) and one panel.
    """
    codes_at, groups_at = panel * (len(codes) // num_panels), panel * (len(scales) // num_panels)
    if kind == INT4:
        _multiply_int4(
            x, x_at, x_step, count, begin, end, codes, codes_at, scales, zeros, groups, groups_at,
            0, sums,
        )  # fmt: skip
    elif kind == INT8:
        _multiply_int8(
            x, x_at, x_step, count, begin, end, codes, codes_at, scales, zeros, groups, groups_at,
            0, sums,
        )  # fmt: skip
    elif kind == FP8:
        _multiply_fp8(
            x, x_at, x_step, count, begin, end, codes, codes_at, scales, zeros, groups, groups_at,
            0, sums,
        )  # fmt: skip
    else:
        _multiply_table(
            x, x_at, x_step, count, begin, end, codes, codes_at, scales, zeros, groups, groups_at,
            (kind - E2M1) * 16, sums,
        )  # fmt: skip


@inner()
def _convert(
    kind: int, begin: int, end: int, codes: Bytes, panel: int, scales: Floats, zeros: Bytes,
    groups: Ints, num_panels: int, values: Floats,
) -> Any:  # fmt: skip
    """Do the work of `convert` in `_tile_loop` for one panel and any kind of codes."""
    codes_at, groups_at = panel * (len(codes) // num_panels), panel * (len(scales) // num_panels)
    if kind == INT4:
        return _convert_int4(
            begin, end, codes, codes_at, scales, zeros, groups, groups_at, 0, values
        )
    if kind == INT8:
        return _convert_int8(
            begin, end, codes, codes_at, scales, zeros, groups, groups_at, 0, values
        )
    if kind == FP8:
        return _convert_fp8(
            begin, end, codes, codes_at, scales, zeros, groups, groups_at, 0, values
        )
    return _convert_table(
        begin, end, codes, codes_at, scales, zeros, groups, groups_at, (kind - E2M1) * 16, values
    )


@inner()
def _convert_once(
    x: Floats, floor: int, top: int, begin: int, end: int, kind: int, codes: Bytes, panel: int,
    scales: Floats, zeros: Bytes, groups: Ints, num_panels: int, values: Floats, ones: Floats,
    y: Floats, column: int, width: int,
) -> None:  # fmt: skip
    """Add the products of inputs [begin, end) to the columns of one panel, rows [floor, top).

    The result is bitwise identical to that of `_multiply`, but the codes are converted only once.
    """
    num_inputs = len(groups) // 2
    while begin < end:
        stop, scales_at = _convert(
            kind, begin, end, codes, panel, scales, zeros, groups, num_panels, values
        )
        factors = scales if scales_at >= 0 else ones
        for r in range(floor, top, 4):
            add_scaled_tile(
                x, r * num_inputs + begin, num_inputs, min(4, top - r), stop - begin, values,
                factors, max(0, scales_at), y, r * width + column, width,
            )  # fmt: skip
        begin = stop


@inner(allocates=True)
def _whole_panels(
    x: Floats, num_rows: int, kind: int, codes: Bytes, scales: Floats, zeros: Bytes, groups: Ints,
    bias: Floats, first: int, last: int, y: Floats, width: int,
) -> None:  # fmt: skip
    """Compute the outputs of panels [first, last) and store them from column 0 of y on.

    y is [num_rows, width].
    """
    num_inputs, num_panels = len(groups) // 2, len(bias) // PANEL
    sums = np.zeros(TILE_ROWS * PANEL, np.float32)
    converts_once = _CONVERTS_ONCE and num_rows > TILE_ROWS
    values = np.empty(BLOCK_K * PANEL if converts_once else 0, np.float32)
    ones = np.ones(PANEL, np.float32)
    for floor in range(0, num_rows, _BLOCK_ROWS):
        top = min(floor + _BLOCK_ROWS, num_rows)
        for panel in range(first, last):
            column = (panel - first) * PANEL
            for begin in range(0, num_inputs, BLOCK_K):
                end = min(begin + BLOCK_K, num_inputs)
                if converts_once and top - floor > TILE_ROWS:
                    if begin == 0:
                        at = floor * width + column
                        copy_panel(bias, panel * PANEL, 0, top - floor, y, at, width)
                    _convert_once(
                        x, floor, top, begin, end, kind, codes, panel, scales, zeros, groups,
                        num_panels, values, ones, y, column, width,
                    )  # fmt: skip
                    continue
                for r in range(floor, top, TILE_ROWS):
                    count, at = min(TILE_ROWS, top - r), r * width + column
                    if begin == 0:
                        copy_panel(bias, panel * PANEL, 0, count, sums, 0, PANEL)
                    else:
                        copy_panel(y, at, width, count, sums, 0, PANEL)
                    _multiply(
                        kind, x, r * num_inputs, num_inputs, count, begin, end, codes, panel,
                        scales, zeros, groups, num_panels, sums,
                    )  # fmt: skip
                    copy_panel(sums, 0, PANEL, count, y, at, width)


@inner()
def copy_last_columns(
    spare: Floats, num_rows: int, column: int, y: Floats, num_outputs: int
) -> None:
    """Copy the outputs of a partly filled panel to the columns of y from `column` on.

    `spare` is [num_rows, PANEL], and y is [num_rows, num_outputs].
    """
    for r in range(num_rows):
        for c in range(num_outputs - column):
            y[r * num_outputs + column + c] = spare[r * PANEL + c]


@inner(allocates=True)
def compute_columns(
    x: Floats, num_rows: int, kind: int, codes: Bytes, scales: Floats, zeros: Bytes, groups: Ints,
    bias: Floats, y: Floats, num_outputs: int, first: int, last: int,
) -> None:  # fmt: skip
    """Compute the columns of panels [first, last) of y [num_rows, num_outputs].

    A last panel that is only partly filled is computed into a temporary array.
    """
    whole = min(last, num_outputs // PANEL)
    if first < whole:
        _whole_panels(
            x, num_rows, kind, codes, scales, zeros, groups, bias, first, whole,
            y[first * PANEL :], num_outputs,
        )  # fmt: skip
    if max(first, whole) < last:
        spare = np.empty(num_rows * PANEL, np.float32)
        _whole_panels(
            x, num_rows, kind, codes, scales, zeros, groups, bias, last - 1, last, spare, PANEL
        )  # fmt: skip
        copy_last_columns(spare, num_rows, (last - 1) * PANEL, y, num_outputs)


_SIGNATURE = (
    "void(float32[::1], int64, int64, uint8[::1], float32[::1], uint8[::1], int32[::1],"
    " float32[::1], float32[::1]"
)


@entry(_SIGNATURE + ")")
def _serial(
    x: Floats,  # [T * K]
    num_rows: int,
    kind: int,
    codes: Bytes,  # the codes of W in panels, see `quantized.DequantizingLinear`
    scales: Floats,  # [P, G, PANEL], flattened
    zeros: Bytes,  # zero points [P, G, PANEL], flattened; empty except for INT4 and INT8
    groups: Ints,  # [2, K], flattened: group of each input, then end of its run of equal groups
    bias: Floats,  # [P * PANEL]
    y: Floats,  # [T * P * PANEL]
) -> None:
    """Compute the linear layer's output y in one thread."""
    last = len(bias) // PANEL
    compute_columns(
        x, num_rows, kind, codes, scales, zeros, groups, bias, y, len(bias), 0, last
    )  # fmt: skip


@entry(_SIGNATURE + ", int64)", parallel=True)
def _parallel(
    x: Floats, num_rows: int, kind: int, codes: Bytes, scales: Floats, zeros: Bytes, groups: Ints,
    bias: Floats, y: Floats, num_threads: int,
) -> None:  # fmt: skip
    """Compute y with several threads: each thread computes a range of panels."""
    num_panels = len(bias) // PANEL
    for thread in numba.prange(num_threads):
        first = num_panels * thread // num_threads
        last = num_panels * (thread + 1) // num_threads
        if first < last:
            compute_columns(
                x, num_rows, kind, codes, scales, zeros, groups, bias, y, len(bias), first, last
            )  # fmt: skip


def load() -> None:
    """Compile the loops, or load them from the cache on disk."""
    load_entries(_serial, _parallel)


def run(*given: Any, num_threads: int) -> None:
    """Compute the linear layer's output y. `given` are the arguments of `_serial`."""
    run_serial_or_parallel(_serial, _parallel, *given, num_threads=num_threads)
