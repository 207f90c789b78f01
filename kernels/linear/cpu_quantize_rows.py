"""CPU loops of `quantize_rows`, compiled by numba."""

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import entry, load_entries, run_serial_or_parallel

Floats = npt.NDArray[np.float32]

_QMAX, _ZERO_POINT, _MIN_SCALE = np.float32(127), np.int32(128), np.float32(1e-30)


@inner()
def quantize_rows(
    x: Floats, qvalues: npt.NDArray[np.uint8], factors: Floats, limit: float, first: int, last: int
) -> None:
    """Quantize rows [first, last) of x [T, K] into `qvalues` [T, K] and scales `factors` [T].

    Args:
        limit: largest magnitude with a static scale; 0: the largest magnitude of each row.
    """
    magnitudes = factors.view(np.int32)
    for t in range(first, last):
        row, out = x[t], qvalues[t]
        # Absolute values are compared as integers. Their bits have the same order as the floats,
        # and the bits of NaN are the largest.
        bits, most = row.view(np.int32), np.int32(0)
        for i in range(len(bits)):
            most = max(most, bits[i] & np.int32(0x7FFFFFFF))
        magnitudes[t] = most
        largest = factors[t]
        if largest < _MIN_SCALE:
            largest = _MIN_SCALE
        if limit > 0 and largest < np.inf:  # a scale of NaN or Inf propagates the error
            largest = np.float32(limit)
            step = _QMAX / largest
            for i in range(len(row)):
                clipped = min(max(row[i], -largest), largest)
                out[i] = np.uint8(np.int32(np.rint(clipped * step)) + _ZERO_POINT)
        else:
            step = _QMAX / largest
            for i in range(len(row)):
                out[i] = np.uint8(np.int32(np.rint(row[i] * step)) + _ZERO_POINT)
        factors[t] = largest / _QMAX


@entry("void(float32[:,::1], uint8[:,::1], float32[::1], float32)")
def _serial(x: Floats, qvalues: npt.NDArray[np.uint8], factors: Floats, limit: float) -> None:
    quantize_rows(x, qvalues, factors, limit, 0, len(x))


@entry("void(float32[:,::1], uint8[:,::1], float32[::1], float32, int64)", parallel=True)
def _parallel(
    x: Floats, qvalues: npt.NDArray[np.uint8], factors: Floats, limit: float, num_threads: int
) -> None:
    for thread in numba.prange(num_threads):
        first, last = len(x) * thread // num_threads, len(x) * (thread + 1) // num_threads
        quantize_rows(x, qvalues, factors, limit, first, last)


def load() -> None:
    """Compile the loops, or load them from the cache on disk."""
    load_entries(_serial, _parallel)


def run(
    x: Floats, qvalues: npt.NDArray[np.uint8], factors: Floats, limit: float, num_threads: int
) -> None:
    """Quantize x [T, K] into `qvalues` [T, K] and scales `factors` [T]; see `quantize_rows`."""
    run_serial_or_parallel(_serial, _parallel, x, qvalues, factors, limit, num_threads=num_threads)
