"""The loops of `level_product`, compiled by numba.

Up to 16 rows go with 64 columns at once, more of them 32 with 32. Weights are read from first to
last, and asked for a while before.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.compiled import entry, load_entries, run_loops
from penstock.kernels.lanes import (
    WIDE,
    added,
    ask_ahead,
    load_numbers,
    load_wide,
    spread,
    store,
    times,
)
from penstock.kernels.late_codegen import inner
from penstock.kernels.level_tiles import DEEP, TILE, multiply
from penstock.kernels.matrix_tiles import ROWS, release_tiles, set_tiles, start_sums, store_sums

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Sums = npt.NDArray[np.int32]

ACROSS = 4
"""Tiles of columns that lie side by side, step by step."""

BROAD = ACROSS * 16
"""Columns that a thread takes together."""

HIGH = 2 * ROWS

_AHEAD = 8 * TILE
"""Bytes."""

_start_flat, _start_square = start_sums(1, 4), start_sums(2, 2)
_store_flat, _store_square = store_sums(1, 4), store_sums(2, 2)
_multiply_flat, _multiply_square = multiply(1, 4), multiply(2, 2)


@inner()
def _shapes(num_rows: int) -> Any:
    """Of up to 32 rows: tiles of sums and of rows have those that are there."""
    shapes = np.zeros(64, np.uint8)
    shapes[0] = 1
    for register in range(8):
        shapes[16 + 2 * register] = 64
        shapes[48 + register] = ROWS
    if num_rows <= ROWS:
        for register in range(5):
            shapes[48 + register] = num_rows
    else:
        shapes[48 + 2] = shapes[48 + 3] = shapes[48 + 5] = num_rows - ROWS
    return shapes


@inner()
def _ask(weights: Bytes, at: int, count: int) -> None:
    for line in range(at, min(at + count, len(weights)), 64):
        ask_ahead(weights, line)


@inner()
def _put(
    sums: Sums, num_rows: int, num_columns: int, factors: Floats, scales: Floats, bias: Floats,
    y: Floats, at: int, width: int,
) -> None:  # fmt: skip
    for r in range(num_rows):
        factor, row, into = spread(factors, r), r * num_columns, at + r * width
        for c in range(0, num_columns, WIDE):
            found = times(load_numbers(sums, row + c), load_wide(scales, c))
            store(y, into + c, added(times(found, factor), load_wide(bias, c)))


@inner()
def _flat(
    levels: Bytes, levels_at: int, num_inputs: int, num_rows: int, weights: Bytes, block: int,
    shifts: Sums, factors: Floats, scales: Floats, bias: Floats, y: Floats, y_at: int, width: int,
    sums: Sums,
) -> None:  # fmt: skip
    """Up to 16 rows with 64 columns."""
    at, column = block * num_inputs * BROAD, block * BROAD
    _start_flat(shifts, column)
    for k in range(0, num_inputs, DEEP):
        _ask(weights, at + _AHEAD, ACROSS * TILE)
        _multiply_flat(levels, levels_at + k, num_inputs, weights, at)
        at += ACROSS * TILE
    _store_flat(sums, 0, BROAD)
    _put(sums, num_rows, BROAD, factors, scales[column:], bias[column:], y, y_at + column, width)


@inner()
def _square(
    levels: Bytes, levels_at: int, num_inputs: int, num_rows: int, weights: Bytes, block: int,
    half: int, asks: bool, shifts: Sums, factors: Floats, scales: Floats, bias: Floats, y: Floats,
    y_at: int, width: int, sums: Sums,
) -> None:  # fmt: skip
    """Up to 32 rows with 32 columns; asks: for the next ones."""
    at, column = block * num_inputs * BROAD + half * 2 * TILE, block * BROAD + half * 32
    _start_square(shifts, column)
    for k in range(0, num_inputs, DEEP):
        if asks:
            _ask(weights, at + (1 + half) * num_inputs * 32, 2 * TILE)
        _multiply_square(levels, levels_at + k, num_inputs, weights, at)
        at += ACROSS * TILE
    _store_square(sums, 0, 32)
    _put(sums, num_rows, 32, factors, scales[column:], bias[column:], y, y_at + column, width)


@inner()
def share(
    levels: Bytes, num_rows: int, num_inputs: int, weights: Bytes, shifts: Sums, factors: Floats,
    scales: Floats, bias: Floats, y: Floats, width: int, first: int, last: int,
) -> None:  # fmt: skip
    """Of y's columns, BROAD after BROAD, those from `first` to `last`."""
    sums, whole = np.empty(HIGH * BROAD, np.int32), num_rows // HIGH * HIGH
    if whole:
        set_tiles(_shapes(HIGH))
        for block in range(first, last):
            for half in range(2):
                for r in range(0, whole, HIGH):
                    _square(
                        levels, r * num_inputs, num_inputs, HIGH, weights, block, half, r == 0,
                        shifts, factors[r:], scales, bias, y, r * width, width, sums,
                    )  # fmt: skip
    rest = num_rows - whole
    if rest:
        set_tiles(_shapes(rest))
        own, at, y_at = factors[whole:], whole * num_inputs, whole * width
        for block in range(first, last):
            if rest <= ROWS:
                _flat(
                    levels, at, num_inputs, rest, weights, block, shifts, own, scales, bias, y,
                    y_at, width, sums,
                )  # fmt: skip
            else:
                for half in range(2):
                    _square(
                        levels, at, num_inputs, rest, weights, block, half, True, shifts, own,
                        scales, bias, y, y_at, width, sums,
                    )  # fmt: skip
    release_tiles()


_SIGNATURE = (
    "void(uint8[::1], int64, int64, uint8[::1], int32[::1], float32[::1], float32[::1],"
    " float32[::1], float32[::1], int64"
)


@entry(_SIGNATURE + ")")
def _alone(
    levels: Bytes,  # [T K]
    num_rows: int,
    num_inputs: int,  # a multiple of DEEP
    weights: Bytes,  # [blocks, steps, ACROSS, 16, 16, 4]
    shifts: Sums,  # [blocks BROAD] what sums begin with
    factors: Floats,  # [T]
    scales: Floats,  # [blocks BROAD]
    bias: Floats,  # [blocks BROAD]
    y: Floats,  # [T blocks BROAD]
    num_blocks: int,
) -> None:
    """Writes y, in one thread."""
    share(
        levels, num_rows, num_inputs, weights, shifts, factors, scales, bias, y,
        num_blocks * BROAD, 0, num_blocks,
    )  # fmt: skip


@entry(_SIGNATURE + ", int64)", parallel=True)
def _in_threads(
    levels: Bytes, num_rows: int, num_inputs: int, weights: Bytes, shifts: Sums, factors: Floats,
    scales: Floats, bias: Floats, y: Floats, num_blocks: int, num_threads: int,
) -> None:  # fmt: skip
    """The same, some columns a thread; of many rows some of them, which it has made itself."""
    floors = num_rows // HIGH
    for thread in numba.prange(num_threads):
        first, last = num_blocks * thread // num_threads, num_blocks * (thread + 1) // num_threads
        if floors >= 4 * num_threads:
            begin = floors * thread // num_threads * HIGH
            end = floors * (thread + 1) // num_threads * HIGH
            if thread == num_threads - 1:
                end = num_rows
            share(
                levels[begin * num_inputs :], end - begin, num_inputs, weights, shifts,
                factors[begin:], scales, bias, y[begin * num_blocks * BROAD :],
                num_blocks * BROAD, 0, num_blocks,
            )  # fmt: skip
        elif first < last:
            share(
                levels, num_rows, num_inputs, weights, shifts, factors, scales, bias, y,
                num_blocks * BROAD, first, last,
            )  # fmt: skip


def load() -> None:
    """Compile the loops, or load them from disk."""
    load_entries(_alone, _in_threads)


def fill(*given: Any, num_threads: int) -> None:
    """Writes y, in so many threads; given: as of `_alone`."""
    run_loops(_alone, _in_threads, *given, num_threads=num_threads)
