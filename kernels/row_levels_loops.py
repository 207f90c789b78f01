"""The loops of `row_levels`, compiled by numba."""

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.compiled import entry, load_entries, run_loops
from penstock.kernels.late_codegen import inner

Floats = npt.NDArray[np.float32]

_LEVELS, _MIDDLE, _LEAST = np.float32(127), np.int32(128), np.float32(1e-30)


@inner()
def level_rows(
    x: Floats, levels: npt.NDArray[np.uint8], factors: Floats, first: int, last: int
) -> None:
    magnitudes = factors.view(np.int32)
    for t in range(first, last):
        row, out = x[t], levels[t]
        # As integers magnitudes have the same order, with NaN above all.
        bits, most = row.view(np.int32), np.int32(0)
        for i in range(len(bits)):
            most = max(most, bits[i] & np.int32(0x7FFFFFFF))
        magnitudes[t] = most
        largest = factors[t]
        if largest < _LEAST:
            largest = _LEAST
        step = _LEVELS / largest
        for i in range(len(row)):
            out[i] = np.uint8(np.int32(np.rint(row[i] * step)) + _MIDDLE)
        factors[t] = largest / _LEVELS


@entry("void(float32[:,::1], uint8[:,::1], float32[::1])")
def _alone(x: Floats, levels: npt.NDArray[np.uint8], factors: Floats) -> None:
    level_rows(x, levels, factors, 0, len(x))


@entry("void(float32[:,::1], uint8[:,::1], float32[::1], int64)", parallel=True)
def _in_threads(
    x: Floats, levels: npt.NDArray[np.uint8], factors: Floats, num_threads: int
) -> None:
    for thread in numba.prange(num_threads):
        first, last = len(x) * thread // num_threads, len(x) * (thread + 1) // num_threads
        level_rows(x, levels, factors, first, last)


def load() -> None:
    """Compile the loops, or load them from disk."""
    load_entries(_alone, _in_threads)


def fill(x: Floats, levels: npt.NDArray[np.uint8], factors: Floats, num_threads: int) -> None:
    """x [T, K], levels [T, K], factors [T]."""
    run_loops(_alone, _in_threads, x, levels, factors, num_threads=num_threads)
