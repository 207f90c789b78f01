"""AVX-512 VNNI and AVX2 loops of `cpu_packed_int8`, compiled by numba, for CPUs without AMX.

These loops read the weights in the same order as the AMX loops. The int32 sums are exact and are
scaled by the same operations, so the results are bitwise identical to those of `cpu_int8_amx`.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.int8_dot import MAX_ROWS as TILE_ROWS
from penstock.kernels.cpu_common.int8_dot import SIGNED_INPUTS, multiply_rows
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import entry, load_entries, run_serial_or_parallel
from penstock.kernels.linear.cpu_int8_amx import BLOCK_COLUMNS, dequantize_sums

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.int32]

_BLOCK_ROWS = 32 * TILE_ROWS
"""Number of rows that are multiplied by all columns before the next rows. These rows stay in the L2
cache."""

_AHEAD = 128
"""Prefetch distance in inputs: while the weights of input k are multiplied, those of input
k + _AHEAD are prefetched."""

_whole, _whole_ahead = multiply_rows(TILE_ROWS, 0), multiply_rows(TILE_ROWS, _AHEAD)
_one, _two, _three = (multiply_rows(rows, _AHEAD) for rows in (1, 2, 3))
_four, _five = multiply_rows(4, _AHEAD), multiply_rows(5, _AHEAD)  # with AVX-512 only


@inner()
def _multiply(
    qvalues: Bytes, at: int, num_inputs: int, num_rows: int, weights: Bytes, block: int,
    prefetch: bool, shifts: Sums, sums: Sums,
) -> None:  # fmt: skip
    """Compute `sums` [num_rows, BLOCK_COLUMNS] of one column block, for 1 to TILE_ROWS rows."""
    begin, column = block * num_inputs * BLOCK_COLUMNS, block * BLOCK_COLUMNS
    if num_rows == TILE_ROWS:
        if prefetch:
            _whole_ahead(qvalues, at, num_inputs, weights, begin, shifts, column, sums)
        else:
            _whole(qvalues, at, num_inputs, weights, begin, shifts, column, sums)
    elif num_rows == 1:
        _one(qvalues, at, num_inputs, weights, begin, shifts, column, sums)
    elif num_rows == 2:
        _two(qvalues, at, num_inputs, weights, begin, shifts, column, sums)
    elif num_rows == 3:
        _three(qvalues, at, num_inputs, weights, begin, shifts, column, sums)
    elif TILE_ROWS == 6:
        if num_rows == 4:
            _four(qvalues, at, num_inputs, weights, begin, shifts, column, sums)
        else:
            _five(qvalues, at, num_inputs, weights, begin, shifts, column, sums)


@inner()
def _subtract_zero_point(qvalues: Bytes, begin: int, count: int, signed: Bytes) -> None:
    """Store the inputs [begin, begin + count) minus their zero point 128, as signed bytes."""
    for i in range(count):
        signed[i] = qvalues[begin + i] ^ np.uint8(128)


@inner()
def _compute_columns(
    qvalues: Bytes, num_rows: int, num_inputs: int, weights: Bytes, shifts: Sums, factors: Floats,
    scales: Floats, bias: Floats, y: Floats, width: int, first: int, last: int, sums: Sums,
    signed: Bytes,
) -> None:  # fmt: skip
    """Compute column blocks [first, last) of y [num_rows, width].

    Only this thread uses the scratch arrays `sums` and `signed`.
    """
    inputs = signed if SIGNED_INPUTS else qvalues
    for floor in range(0, num_rows, _BLOCK_ROWS):
        top = min(floor + _BLOCK_ROWS, num_rows)
        first_row = floor if SIGNED_INPUTS else 0  # index of the first row in `inputs`
        if SIGNED_INPUTS:
            _subtract_zero_point(qvalues, floor * num_inputs, (top - floor) * num_inputs, signed)
        for block in range(first, last):
            column = block * BLOCK_COLUMNS
            for r in range(floor, top, TILE_ROWS):
                count = min(TILE_ROWS, top - r)
                _multiply(
                    inputs, (r - first_row) * num_inputs, num_inputs, count, weights, block,
                    r == floor, shifts, sums,
                )  # fmt: skip
                dequantize_sums(
                    sums, count, BLOCK_COLUMNS, factors[r:], scales[column:], bias[column:], y,
                    r * width + column, width,
                )  # fmt: skip


@inner(allocates=True)
def compute_columns(
    qvalues: Bytes, num_rows: int, num_inputs: int, weights: Bytes, shifts: Sums, factors: Floats,
    scales: Floats, bias: Floats, y: Floats, width: int, first: int, last: int,
) -> None:  # fmt: skip
    """Allocate scratch arrays, and compute column blocks [first, last) of y [num_rows, width]."""
    sums = np.empty(TILE_ROWS * BLOCK_COLUMNS, np.int32)
    signed_rows = min(num_rows, _BLOCK_ROWS) if SIGNED_INPUTS else 0
    signed = np.empty(signed_rows * num_inputs, np.uint8)
    _compute_columns(
        qvalues, num_rows, num_inputs, weights, shifts, factors, scales, bias, y, width, first,
        last, sums, signed,
    )  # fmt: skip


_SIGNATURE = (
    "void(uint8[::1], int64, int64, uint8[::1], int32[::1], float32[::1], float32[::1],"
    " float32[::1], float32[::1], int64"
)


@entry(_SIGNATURE + ")")
def _serial(
    qvalues: Bytes, num_rows: int, num_inputs: int, weights: Bytes, shifts: Sums, factors: Floats,
    scales: Floats, bias: Floats, y: Floats, num_blocks: int,
) -> None:  # fmt: skip
    """Compute the linear layer's output y in one thread; see `cpu_int8_amx` for the arguments."""
    compute_columns(
        qvalues, num_rows, num_inputs, weights, shifts, factors, scales, bias, y,
        num_blocks * BLOCK_COLUMNS, 0, num_blocks,
    )  # fmt: skip


@entry(_SIGNATURE + ", int64)", parallel=True)
def _parallel(
    qvalues: Bytes, num_rows: int, num_inputs: int, weights: Bytes, shifts: Sums, factors: Floats,
    scales: Floats, bias: Floats, y: Floats, num_blocks: int, num_threads: int,
) -> None:  # fmt: skip
    """Compute y with several threads, each for a range of columns or (for many rows) of rows."""
    tiles, width = -(-num_rows // TILE_ROWS), num_blocks * BLOCK_COLUMNS
    for thread in numba.prange(num_threads):
        if num_rows >= _BLOCK_ROWS:
            begin = min(tiles * thread // num_threads * TILE_ROWS, num_rows)
            end = min(tiles * (thread + 1) // num_threads * TILE_ROWS, num_rows)
            compute_columns(
                qvalues[begin * num_inputs :], end - begin, num_inputs, weights, shifts,
                factors[begin:], scales, bias, y[begin * width :], width, 0, num_blocks,
            )  # fmt: skip
        else:
            first = num_blocks * thread // num_threads
            last = num_blocks * (thread + 1) // num_threads
            compute_columns(
                qvalues, num_rows, num_inputs, weights, shifts, factors, scales, bias, y, width,
                first, last,
            )  # fmt: skip


def load() -> None:
    """Compile the loops, or load them from the cache on disk."""
    load_entries(_serial, _parallel)


def run(*given: Any, num_threads: int) -> None:
    """Compute the linear layer's output y with `num_threads` threads.

    Args:
        given: the arguments of `_serial`.
        num_threads: number of threads.
    """
    run_serial_or_parallel(_serial, _parallel, *given, num_threads=num_threads)
