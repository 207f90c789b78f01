"""AVX-512 VNNI and AVX2 loops of `cpu_packed_int4`, compiled by numba.

A tile is one panel of outputs and 1, 2, 4, 6 or 8 rows (1, 2 or 4 with AVX2). `cpu_int4_tiles`
computes the products of a tile for one block of inputs.

Shapes: T rows of x, K inputs, P panels of PANEL outputs.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import entry, load_entries, run_serial_or_parallel
from penstock.kernels.cpu_common.simd import VECTOR_WIDTH
from penstock.kernels.linear.cpu_code_tiles import TILE_ROWS
from penstock.kernels.linear.cpu_dequantizing import copy_last_columns
from penstock.kernels.linear.cpu_f32_simd import copy_panel
from penstock.kernels.linear.cpu_int4_tiles import expand_codes, multiply_block
from penstock.kernels.linear.int8_blocks import BLOCK_INPUTS, UNIT_INPUTS
from penstock.kernels.linear.panels import PANEL

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
SignedBytes = npt.NDArray[np.int8]
Ints = npt.NDArray[np.int32]

_BLOCK_ROWS = 64
"""Number of rows that are multiplied by all panels before the next rows (loop tiling)."""

_EXPANDS_ONCE = VECTOR_WIDTH == 8
"""Whether several tiles of rows share the codes of a panel as bytes. With AVX2, a tile has only
four rows, so each tile would spend a third of its time on its own conversion."""

_multiply, _multiply_expanded = multiply_block(is_expanded=False), multiply_block(is_expanded=True)


@inner(allocates=True)
def _whole_panels(
    qvalues: SignedBytes, row_scales: Floats, offsets: Ints, num_rows: int, num_inputs: int,
    run: int, group_inputs: int, codes: Bytes, scales: Floats, zeros: Bytes, bias: Floats,
    first: int, last: int, y: Floats, width: int,
) -> None:  # fmt: skip
    """Compute the outputs of panels [first, last) and store them from column 0 of y on.

    y is [num_rows, width].
    """
    num_panels, block_runs = len(bias) // PANEL, BLOCK_INPUTS // run
    num_blocks, num_runs = -(-num_inputs // BLOCK_INPUTS), -(-num_inputs // run)
    panel_codes, panel_scales = len(codes) // num_panels, len(scales) // num_panels
    group_step = PANEL if group_inputs == run else 0
    expanded = np.empty(BLOCK_INPUTS * PANEL if _EXPANDS_ONCE else 0, np.uint8)
    # Tiles add to this contiguous array. Rows of y whose distance is a power of two would share a
    # few sets of the cache.
    sums = np.empty(min(num_rows, _BLOCK_ROWS) * PANEL, np.float32)
    for floor in range(0, num_rows, _BLOCK_ROWS):
        top = min(floor + _BLOCK_ROWS, num_rows)
        expands = _EXPANDS_ONCE and top - floor > TILE_ROWS
        for panel in range(first, last):
            copy_panel(bias, panel * PANEL, 0, top - floor, sums, 0, PANEL)
            for block in range(num_blocks):
                begin = block * BLOCK_INPUTS
                codes_at = panel * panel_codes + begin // UNIT_INPUTS * PANEL * 4
                group_at = panel * panel_scales + begin // group_inputs * PANEL
                size = min(BLOCK_INPUTS, num_inputs - begin)
                if expands:
                    expand_codes(codes, codes_at, size, expanded)
                for r in range(floor, top, TILE_ROWS):
                    q_at, scale_at = r * num_inputs + begin, r * num_blocks + block
                    offset_at, sums_at = r * num_runs + block * block_runs, (r - floor) * PANEL
                    count = min(TILE_ROWS, top - r)
                    if expands:
                        _multiply_expanded(
                            qvalues, q_at, num_inputs, row_scales, scale_at, num_blocks,
                            offsets, offset_at, num_runs, count, size, run,
                            expanded, 0, scales, zeros, group_at, group_step, sums, sums_at, PANEL,
                        )  # fmt: skip
                    else:
                        _multiply(
                            qvalues, q_at, num_inputs, row_scales, scale_at, num_blocks,
                            offsets, offset_at, num_runs, count, size, run, codes, codes_at,
                            scales, zeros, group_at, group_step, sums, sums_at, PANEL,
                        )  # fmt: skip
            column = (panel - first) * PANEL
            copy_panel(sums, 0, PANEL, top - floor, y, floor * width + column, width)


@inner(allocates=True)
def compute_columns(
    qvalues: SignedBytes, row_scales: Floats, offsets: Ints, num_rows: int, num_inputs: int,
    run: int, group_inputs: int, codes: Bytes, scales: Floats, zeros: Bytes, bias: Floats,
    y: Floats, num_outputs: int, first: int, last: int,
) -> None:  # fmt: skip
    """Compute the columns of panels [first, last) of y [num_rows, num_outputs].

    A last panel that is only partly filled is computed into a temporary array.
    """
    whole = min(last, num_outputs // PANEL)
    if first < whole:
        _whole_panels(
            qvalues, row_scales, offsets, num_rows, num_inputs, run, group_inputs, codes, scales,
            zeros, bias, first, whole, y[first * PANEL :], num_outputs,
        )  # fmt: skip
    if max(first, whole) < last:
        spare = np.empty(num_rows * PANEL, np.float32)
        _whole_panels(
            qvalues, row_scales, offsets, num_rows, num_inputs, run, group_inputs, codes, scales,
            zeros, bias, last - 1, last, spare, PANEL,
        )  # fmt: skip
        copy_last_columns(spare, num_rows, (last - 1) * PANEL, y, num_outputs)


_SIGNATURE = (
    "void(int8[::1], float32[::1], int32[::1], int64, int64, int64, int64, uint8[::1],"
    " float32[::1], uint8[::1], float32[::1], float32[::1]"
)


@entry(_SIGNATURE + ")")
def _serial(
    qvalues: SignedBytes,  # [T * K] activations as int8, see `quantize_blocks`
    row_scales: Floats,  # [T * blocks] scales of the activations
    offsets: Ints,  # [T * runs] minus the sum of each run of activations
    num_rows: int,
    num_inputs: int,
    run: int,
    group_inputs: int,
    codes: Bytes,  # `codes` to `bias` are fields of `PackedLinearInt4`
    scales: Floats,
    zeros: Bytes,
    bias: Floats,
    y: Floats,  # [T * P * PANEL]
) -> None:
    """Compute the linear layer's output y in one thread."""
    compute_columns(
        qvalues, row_scales, offsets, num_rows, num_inputs, run, group_inputs, codes, scales,
        zeros, bias, y, len(bias), 0, len(bias) // PANEL,
    )  # fmt: skip


@entry(_SIGNATURE + ", int64)", parallel=True)
def _parallel(
    qvalues: SignedBytes, row_scales: Floats, offsets: Ints, num_rows: int, num_inputs: int,
    run: int, group_inputs: int, codes: Bytes, scales: Floats, zeros: Bytes, bias: Floats,
    y: Floats, num_threads: int,
) -> None:  # fmt: skip
    """Compute y with several threads: each thread computes a range of panels."""
    num_panels = len(bias) // PANEL
    for thread in numba.prange(num_threads):
        first = num_panels * thread // num_threads
        last = num_panels * (thread + 1) // num_threads
        if first < last:
            compute_columns(
                qvalues, row_scales, offsets, num_rows, num_inputs, run, group_inputs, codes,
                scales, zeros, bias, y, len(bias), first, last,
            )  # fmt: skip


def load() -> None:
    """Compile the loops, or load them from the cache on disk."""
    load_entries(_serial, _parallel)


def run(*given: Any, num_threads: int) -> None:
    """Compute the linear layer's output y. `given` are the arguments of `_serial`."""
    run_serial_or_parallel(_serial, _parallel, *given, num_threads=num_threads)
