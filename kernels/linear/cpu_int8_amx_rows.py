"""AMX loops of `cpu_packed_int8` for many rows, compiled by numba.

Each thread computes all outputs of its own rows. It first quantizes these rows, in the order in
which AMX reads them: blocks of 32 rows; in each block, steps of 64 inputs; in each step, two tiles
of 16 rows. Then it computes 32 columns at a time. Their weights stay in the L1 cache while the
tiles of all rows are read once from the L2 cache.

The 32 columns can also be 16 gates and the 16 values that they multiply. A gated activation is then
computed from the sums, so that the output of the product is never written to memory.

Shapes: T rows of x, K inputs.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.activation.cpu import gate_columns
from penstock.kernels.cpu_common.amx import (
    ROWS,
    load_accumulators,
    store_accumulators,
    tilerelease,
)
from penstock.kernels.cpu_common.amx_int8 import TILE, TILE_K, multiply_tiles_int8
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
from penstock.kernels.linear.cpu_int8_amx import (
    BLOCK_ROWS,
    PAIR_COLUMNS,
    configure_tiles,
    dequantize_sums,
)
from penstock.kernels.linear.cpu_quantize_rows import quantize_values, row_scale
from penstock.kernels.linear.gate_kinds import NO_GATE, TANH_GELU

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.int32]

_start, _store_sums = load_accumulators(2, 2), store_accumulators(2, 2)


@inner()
def _quantize_tiles(
    x: Floats, num_inputs: int, limit: float, tiles: Bytes, factors: Floats, first: int, last: int
) -> None:
    """Quantize rows [first, last) of x [T * K] to `tiles` and the scales `factors` [T].

    For `limit` see `quantize_rows`.
    """
    for t in range(first, last):
        row = x[t * num_inputs : (t + 1) * num_inputs]
        step, bound, factors[t] = row_scale(row, limit)
        block, r = divmod(t, BLOCK_ROWS)
        at = block * BLOCK_ROWS * num_inputs + r * TILE_K
        for k in range(0, num_inputs, TILE_K):
            quantize_values(row[k : k + TILE_K], tiles[at : at + TILE_K], step, bound)
            at += 2 * TILE


@inner()
def _copy_columns(values: Any, left: int, right: int, out: Any) -> None:
    """Copy the values of two tiles of columns, which begin at columns `left` and `right`."""
    for i in range(ROWS):
        out[i], out[ROWS + i] = values[left + i], values[right + i]


@inner()
def _gate_sums(
    sums: Sums, num_rows: int, factors: Floats, scales: Floats, bias: Floats, is_gelu: bool,
    values: Floats, y: Floats, at: int, width: int,
) -> None:  # fmt: skip
    """Write the gated activation of one tile of gates and one tile of other values to y.

    `values` is a scratch array of 3 * BLOCK_ROWS * ROWS elements: gates, other values, and results.
    """
    size = BLOCK_ROWS * ROWS
    for r in range(num_rows):
        factor = broadcast_load(factors, r)
        for c in range(0, PAIR_COLUMNS, VECTOR_WIDTH):
            found = vmul(load_i32_as_f32(sums, r * PAIR_COLUMNS + c), load_wide(scales, c))
            into = c // ROWS * size + r * ROWS + c % ROWS
            store(values, into, vadd(vmul(found, factor), load_wide(bias, c)))
    used = num_rows * ROWS
    gate_columns(values[:used], values[size : size + used], values[2 * size :][:used], is_gelu)
    for r in range(num_rows):
        for c in range(0, ROWS, VECTOR_WIDTH):
            store(y, at + r * width + c, load_wide(values, 2 * size + r * ROWS + c))


@inner()
def _multiply_rows(
    num_inputs: int, tiles: Bytes, factors: Floats, weights: Bytes, shifts: Sums, scales: Floats,
    bias: Floats, gate: int, y: Floats, first: int, last: int, sums: Sums, values: Floats,
    own_shifts: Sums, own_scales: Floats, own_bias: Floats,
) -> None:  # fmt: skip
    """Compute rows [first, last) of y from the quantized rows `tiles`.

    The arguments from `sums` on are scratch arrays, which only this thread uses.
    """
    num_columns, num_blocks = len(scales), -(-(last - first) // BLOCK_ROWS)
    # Distance between the first columns of two pairs, and between the two tiles of a pair.
    along, apart = (PAIR_COLUMNS, ROWS) if gate == NO_GATE else (ROWS, num_columns // 2)
    width = num_columns if gate == NO_GATE else num_columns // 2
    for column in range(0, width, along):
        left, right, ahead = column * num_inputs, (column + apart) * num_inputs, along * num_inputs
        size = num_inputs * ROWS
        _copy_columns(shifts, column, column + apart, own_shifts)
        _copy_columns(scales, column, column + apart, own_scales)
        _copy_columns(bias, column, column + apart, own_bias)
        for block in range(num_blocks):
            t = first + block * BLOCK_ROWS
            at, k = t * num_inputs, 0
            # Each block prefetches some of the next weights.
            begin, end = size * block // num_blocks, size * (block + 1) // num_blocks
            if right + ahead + end <= len(weights):
                for line in range(begin, end, 64):
                    prefetch(weights, left + ahead + line)
                    prefetch(weights, right + ahead + line)
            _start(own_shifts, 0)
            for _ in range(num_inputs // TILE_K):
                multiply_tiles_int8(tiles, at, weights, left + k, right + k)
                at, k = at + 2 * TILE, k + TILE
            _store_sums(sums, 0, PAIR_COLUMNS)
            num_rows, y_at = min(BLOCK_ROWS, last - t), t * width + column
            if gate == NO_GATE:
                dequantize_sums(
                    sums, num_rows, PAIR_COLUMNS, factors[t:], own_scales, own_bias, y, y_at, width
                )
            else:
                _gate_sums(
                    sums, num_rows, factors[t:], own_scales, own_bias, gate == TANH_GELU, values,
                    y, y_at, width,
                )  # fmt: skip


@inner(allocates=True)
def _compute_rows(
    x: Floats, num_inputs: int, limit: float, tiles: Bytes, factors: Floats, weights: Bytes,
    shifts: Sums, scales: Floats, bias: Floats, gate: int, y: Floats, first: int, last: int,
) -> None:  # fmt: skip
    """Compute rows [first, last) of y. `first` is a multiple of BLOCK_ROWS."""
    sums, shapes = np.empty(BLOCK_ROWS * PAIR_COLUMNS + 16, np.int32), np.empty(64, np.uint8)
    sums = sums[-sums.ctypes.data % 64 // 4 :]  # aligned to a cache line
    values = np.empty(3 * BLOCK_ROWS * ROWS, np.float32)
    own_shifts = np.empty(PAIR_COLUMNS, np.int32)
    own_scales, own_bias = np.empty(PAIR_COLUMNS, np.float32), np.empty(PAIR_COLUMNS, np.float32)
    _quantize_tiles(x, num_inputs, limit, tiles, factors, first, last)
    configure_tiles(BLOCK_ROWS, shapes)
    _multiply_rows(
        num_inputs, tiles, factors, weights, shifts, scales, bias, gate, y, first, last, sums,
        values, own_shifts, own_scales, own_bias,
    )  # fmt: skip
    tilerelease()


_SIGNATURE = (
    "void(float32[::1], int64, float32, uint8[::1], float32[::1], uint8[::1], int32[::1],"
    " float32[::1], float32[::1], int64, float32[::1]"
)


@entry(_SIGNATURE + ")")
def _serial(
    x: Floats,  # [T * K]
    num_inputs: int,  # K, a multiple of TILE_K
    limit: float,  # see `quantize_rows`
    tiles: Bytes,  # [T * K] scratch for quantized x, with T rounded up to a multiple of 32
    factors: Floats,  # [T] scratch for the scales of the rows of x
    weights: Bytes,  # [blocks, 4 strips, steps, 16, 16, 4]
    shifts: Sums,  # [blocks * BLOCK_COLUMNS] initial values of the sums
    scales: Floats,  # [blocks * BLOCK_COLUMNS] scales of the rows of W
    bias: Floats,  # [blocks * BLOCK_COLUMNS]
    gate: int,  # NO_GATE, or the gated activation (`gate_kinds`)
    y: Floats,  # [T * blocks * BLOCK_COLUMNS], with a gate [T * blocks * BLOCK_COLUMNS / 2]
) -> None:
    """Compute the linear layer's output y in one thread."""
    _compute_rows(
        x, num_inputs, limit, tiles, factors, weights, shifts, scales, bias, gate, y, 0,
        len(factors),
    )  # fmt: skip


@entry(_SIGNATURE + ", int64)", parallel=True)
def _parallel(
    x: Floats, num_inputs: int, limit: float, tiles: Bytes, factors: Floats, weights: Bytes,
    shifts: Sums, scales: Floats, bias: Floats, gate: int, y: Floats, num_threads: int,
) -> None:  # fmt: skip
    """Compute y with several threads, each for a range of rows."""
    num_blocks = -(-len(factors) // BLOCK_ROWS)
    for thread in numba.prange(num_threads):
        first = num_blocks * thread // num_threads * BLOCK_ROWS
        last = min(num_blocks * (thread + 1) // num_threads * BLOCK_ROWS, len(factors))
        if first < last:
            _compute_rows(
                x, num_inputs, limit, tiles, factors, weights, shifts, scales, bias, gate, y,
                first, last,
            )  # fmt: skip


def load() -> None:
    """Compile the loops, or load them from the cache on disk."""
    load_entries(_serial, _parallel)


def run(*given: Any, num_threads: int) -> None:
    """Compute the linear layer's output y. `given` are the arguments of `_serial`."""
    run_serial_or_parallel(_serial, _parallel, *given, num_threads=num_threads)
