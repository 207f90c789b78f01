"""AMX loops of `cpu_packed_int8`, compiled by numba.

The four accumulator tiles cover 16 rows by 64 columns of y if y has up to 16 rows, otherwise 32
rows by 32 columns. Weights are prefetched.

Shapes: T rows of x, K inputs. A strip is the K * 16 weights of 16 columns, which are contiguous.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.amx import (
    ROWS,
    ldtilecfg,
    load_accumulators,
    store_accumulators,
    tilerelease,
)
from penstock.kernels.cpu_common.amx_int8 import TILE, TILE_K, multiply_int8
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import entry, load_entries, run_serial_or_parallel
from penstock.kernels.cpu_common.simd import (
    VECTOR_WIDTH,
    broadcast_load,
    load_i32_as_f32,
    load_wide,
    prefetch,
    store,
    vadd,
    vmul,
)

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.int32]

_BLOCK_STRIPS = 4

BLOCK_COLUMNS = _BLOCK_STRIPS * ROWS
"""Number of output columns per block. Threads divide the columns in whole blocks."""

PAIR_COLUMNS = 2 * ROWS
"""Number of output columns of two strips."""

BLOCK_ROWS = 2 * ROWS

_PREFETCH_STEPS = 2
"""Prefetch distance in steps of TILE_K inputs, for up to 16 rows."""

_start_flat, _start_square = load_accumulators(1, 4), load_accumulators(2, 2)
_store_flat, _store_square = store_accumulators(1, 4), store_accumulators(2, 2)
_multiply_flat, _multiply_square = multiply_int8(1, 4), multiply_int8(2, 2)


@inner()
def configure_tiles(num_rows: int, shapes: Bytes) -> None:
    """Configure the tile registers for exactly `num_rows` rows of x, at most 32.

    `shapes` is a scratch array of 64 bytes.
    """
    shapes[:] = 0
    shapes[0] = 1
    for register in range(8):
        shapes[16 + 2 * register] = 64
        shapes[48 + register] = ROWS
    if num_rows <= ROWS:
        for register in range(5):
            shapes[48 + register] = num_rows
    else:
        shapes[48 + 2] = shapes[48 + 3] = shapes[48 + 5] = num_rows - ROWS
    ldtilecfg(shapes)


@inner()
def _prefetch_tile(weights: Bytes, at: int) -> None:
    """Prefetch the tile at `weights[at:]`, unless it is past the end."""
    if at + TILE <= len(weights):
        for line in range(at, at + TILE, 64):
            prefetch(weights, line)


@inner()
def dequantize_sums(
    sums: Sums, num_rows: int, num_columns: int, factors: Floats, scales: Floats, bias: Floats,
    y: Floats, at: int, width: int,
) -> None:  # fmt: skip
    """Write `sums * scales * factors + bias` to y from index `at` on, for one tile of sums."""
    for r in range(num_rows):
        factor, row, into = broadcast_load(factors, r), r * num_columns, at + r * width
        for c in range(0, num_columns, VECTOR_WIDTH):
            found = vmul(load_i32_as_f32(sums, row + c), load_wide(scales, c))
            store(y, into + c, vadd(vmul(found, factor), load_wide(bias, c)))


@inner()
def _flat(
    qvalues: Bytes, qvalues_at: int, num_inputs: int, num_rows: int, weights: Bytes, block: int,
    shifts: Sums, factors: Floats, scales: Floats, bias: Floats, y: Floats, y_at: int, width: int,
    sums: Sums,
) -> None:  # fmt: skip
    """Compute up to 16 rows of y for one block of 64 columns."""
    column, strip = block * BLOCK_COLUMNS, num_inputs * ROWS
    at, ahead = column * num_inputs, _PREFETCH_STEPS * TILE
    _start_flat(shifts, column)
    for k in range(0, num_inputs, TILE_K):
        if k + _PREFETCH_STEPS * TILE_K == num_inputs:  # continue with the next block
            ahead += (_BLOCK_STRIPS - 1) * strip
        for number in range(_BLOCK_STRIPS):
            _prefetch_tile(weights, at + ahead + number * strip)
        _multiply_flat(qvalues, qvalues_at + k, num_inputs, weights, at)
        at += TILE
    _store_flat(sums, 0, BLOCK_COLUMNS)
    dequantize_sums(
        sums,
        num_rows,
        BLOCK_COLUMNS,
        factors,
        scales[column:],
        bias[column:],
        y,
        y_at + column,
        width,
    )


@inner()
def _square(
    qvalues: Bytes, qvalues_at: int, num_inputs: int, num_rows: int, weights: Bytes, column: int,
    prefetch_next: bool, shifts: Sums, factors: Floats, scales: Floats, bias: Floats, y: Floats,
    y_at: int, width: int, sums: Sums,
) -> None:  # fmt: skip
    """Compute up to 32 rows of y for the PAIR_COLUMNS columns from `column` on.

    If `prefetch_next` is True, also prefetch the weights of the next columns.
    """
    at, strip = column * num_inputs, num_inputs * ROWS
    _start_square(shifts, column)
    for k in range(0, num_inputs, TILE_K):
        if prefetch_next:
            _prefetch_tile(weights, at + 2 * strip)
            _prefetch_tile(weights, at + 3 * strip)
        _multiply_square(qvalues, qvalues_at + k, num_inputs, weights, at)
        at += TILE
    _store_square(sums, 0, PAIR_COLUMNS)
    dequantize_sums(
        sums, num_rows, PAIR_COLUMNS, factors, scales[column:], bias[column:], y, y_at + column,
        width,
    )  # fmt: skip


@inner()
def _compute_columns(
    qvalues: Bytes, num_rows: int, num_inputs: int, weights: Bytes, shifts: Sums, factors: Floats,
    scales: Floats, bias: Floats, y: Floats, width: int, first: int, last: int, sums: Sums,
    shapes: Bytes,
) -> None:  # fmt: skip
    """Compute column blocks [first, last) of y [num_rows, width].

    Only this thread uses the scratch arrays `sums` and `shapes`.
    """
    whole = num_rows // BLOCK_ROWS * BLOCK_ROWS
    if whole:
        configure_tiles(BLOCK_ROWS, shapes)
        for column in range(first * BLOCK_COLUMNS, last * BLOCK_COLUMNS, PAIR_COLUMNS):
            for r in range(0, whole, BLOCK_ROWS):
                _square(
                    qvalues, r * num_inputs, num_inputs, BLOCK_ROWS, weights, column, r == 0,
                    shifts, factors[r:], scales, bias, y, r * width, width, sums,
                )  # fmt: skip
    rest = num_rows - whole
    if rest:
        configure_tiles(rest, shapes)
        own, at, y_at = factors[whole:], whole * num_inputs, whole * width
        if rest <= ROWS:
            for block in range(first, last):
                _flat(
                    qvalues, at, num_inputs, rest, weights, block, shifts, own, scales, bias, y,
                    y_at, width, sums,
                )  # fmt: skip
        else:
            for column in range(first * BLOCK_COLUMNS, last * BLOCK_COLUMNS, PAIR_COLUMNS):
                _square(
                    qvalues, at, num_inputs, rest, weights, column, True, shifts, own, scales,
                    bias, y, y_at, width, sums,
                )  # fmt: skip
    tilerelease()


@inner(allocates=True)
def compute_columns(
    qvalues: Bytes, num_rows: int, num_inputs: int, weights: Bytes, shifts: Sums, factors: Floats,
    scales: Floats, bias: Floats, y: Floats, width: int, first: int, last: int,
) -> None:  # fmt: skip
    """Allocate scratch arrays, and compute column blocks [first, last) of y [num_rows, width]."""
    sums, shapes = np.empty(BLOCK_ROWS * BLOCK_COLUMNS + 16, np.int32), np.empty(64, np.uint8)
    sums = sums[-sums.ctypes.data % 64 // 4 :]  # aligned to a cache line
    _compute_columns(
        qvalues, num_rows, num_inputs, weights, shifts, factors, scales, bias, y, width, first,
        last, sums, shapes,
    )  # fmt: skip


_SIGNATURE = (
    "void(uint8[::1], int64, int64, uint8[::1], int32[::1], float32[::1], float32[::1],"
    " float32[::1], float32[::1], int64"
)


@entry(_SIGNATURE + ")")
def _serial(
    qvalues: Bytes,  # [T * K] quantized x
    num_rows: int,
    num_inputs: int,  # a multiple of TILE_K
    weights: Bytes,  # [blocks, 4 strips, steps, 16, 16, 4]
    shifts: Sums,  # [blocks * BLOCK_COLUMNS] initial values of the sums
    factors: Floats,  # [T] scales of the rows of x
    scales: Floats,  # [blocks * BLOCK_COLUMNS] scales of the rows of W
    bias: Floats,  # [blocks * BLOCK_COLUMNS]
    y: Floats,  # [T * blocks * BLOCK_COLUMNS]
    num_blocks: int,
) -> None:
    """Compute the linear layer's output y in one thread."""
    compute_columns(
        qvalues, num_rows, num_inputs, weights, shifts, factors, scales, bias, y,
        num_blocks * BLOCK_COLUMNS, 0, num_blocks,
    )  # fmt: skip


@entry(_SIGNATURE + ", int64)", parallel=True)
def _parallel(
    qvalues: Bytes, num_rows: int, num_inputs: int, weights: Bytes, shifts: Sums, factors: Floats,
    scales: Floats, bias: Floats, y: Floats, num_blocks: int, num_threads: int,
) -> None:  # fmt: skip
    """Compute y with several threads, each for a range of columns."""
    for thread in numba.prange(num_threads):
        first, last = num_blocks * thread // num_threads, num_blocks * (thread + 1) // num_threads
        if first < last:
            compute_columns(
                qvalues, num_rows, num_inputs, weights, shifts, factors, scales, bias, y,
                num_blocks * BLOCK_COLUMNS, first, last,
            )  # fmt: skip


def load() -> None:
    """Compile the loops, or load them from the cache on disk."""
    load_entries(_serial, _parallel)


def run(*given: Any, num_threads: int) -> None:
    """Compute the linear layer's output y. `given` are the arguments of `_serial`."""
    run_serial_or_parallel(_serial, _parallel, *given, num_threads=num_threads)
