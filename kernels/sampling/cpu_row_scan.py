"""Finds the largest logit of each row on a CPU, and NaN and infinity; compiled by numba."""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.magnitude import INFINITY, MAGNITUDE, largest_magnitude_bits
from penstock.kernels.cpu_common.numba_runtime import entry, load_entries, run_serial_or_parallel
from penstock.kernels.cpu_common.simd import float_of_bits

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_PIECE = 1024
"""Number of elements that are compared at a time. The index of the largest one is then searched for
in one piece only."""


@inner()
def _ordered(bits: Any) -> Any:
    """Convert the bits of a float32 to an int32 of the same order as the floats, or back.

    The bits of positive floats have this order already. Those of negative floats have the opposite
    order, so all bits except the sign are inverted. The casts keep the integers at 32 bits.
    """
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & MAGNITUDE))


@inner()
def _largest(values: Floats) -> Any:
    """Return the largest of some floats. The result is undefined if they contain NaN."""
    bits, largest = values.view(np.int32), np.int32(-0x80000000)
    for i in range(len(bits)):
        largest = np.int32(max(largest, _ordered(bits[i])))
    return float_of_bits(np.int64(_ordered(largest)))


@inner()
def _scan_row(row: Floats) -> tuple[Any, Any, Any]:
    """Scan one row.

    Returns:
        The index of the largest element (the first one on ties), this element, and the bits of the
        largest magnitude. If the row contains NaN, the first two values are meaningless.
    """
    best, best_at, magnitude = np.float32(-np.inf), 0, np.int32(0)
    for begin in range(0, len(row), _PIECE):
        piece = row[begin : min(begin + _PIECE, len(row))]
        magnitude = max(magnitude, largest_magnitude_bits(piece))
        largest = _largest(piece)
        if largest > best:
            best, best_at = largest, begin
    for i in range(best_at, len(row)):
        if row[i] == best:
            return i, best, magnitude
    return 0, best, magnitude


@inner()
def _scan_rows(
    logits: Floats, tokens: Longs, finite: Bools, largest_is_finite: Bools, first: int, last: int
) -> None:
    """Scan the rows [first, last). The arrays are those of `_serial`."""
    for r in range(first, last):
        tokens[r], best, magnitude = _scan_row(logits[r])
        finite[r] = magnitude < INFINITY
        largest_is_finite[r] = magnitude <= INFINITY and -np.inf < best < np.inf


@entry("void(float32[:,::1], int64[::1], boolean[::1], boolean[::1])")
def _serial(
    logits: Floats,  # [R, V]
    tokens: Longs,  # [R] index of the first largest element; undefined if the row contains NaN
    finite: Bools,  # [R] True for rows without NaN and infinite elements
    largest_is_finite: Bools,  # [R] True for rows without NaN whose largest element is finite
) -> None:
    """Scan all rows in one thread."""
    _scan_rows(logits, tokens, finite, largest_is_finite, 0, len(logits))


@entry("void(float32[:,::1], int64[::1], boolean[::1], boolean[::1], int64)", parallel=True)
def _parallel(
    logits: Floats, tokens: Longs, finite: Bools, largest_is_finite: Bools, num_threads: int
) -> None:
    """Scan the rows with several threads."""
    for thread in numba.prange(num_threads):
        first = len(logits) * thread // num_threads
        last = len(logits) * (thread + 1) // num_threads
        _scan_rows(logits, tokens, finite, largest_is_finite, first, last)


def load() -> None:
    """Compile the loops, or load them from the cache on disk."""
    load_entries(_serial, _parallel)


def run(
    logits: Floats, tokens: Longs, finite: Bools, largest_is_finite: Bools, num_threads: int
) -> None:
    """Scan the rows of logits; see `_serial` for the arrays."""
    run_serial_or_parallel(
        _serial, _parallel, logits, tokens, finite, largest_is_finite, num_threads=num_threads
    )
