"""CPU loops of `quantize_rows`, compiled by numba."""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.magnitude import largest_magnitude_bits
from penstock.kernels.cpu_common.numba_runtime import entry, load_entries, run_serial_or_parallel
from penstock.kernels.cpu_common.simd import bits_of_float, float_of_bits

Floats = npt.NDArray[np.float32]

_QMAX, _MIN_SCALE = np.float32(127), np.float32(1e-30)

_ROUNDING = np.float32(1.5 * 2**23 + 128)
"""Adding this number rounds a small float to the nearest integer, ties to even. The lower 8 bits of
the sum are then this integer plus the zero point 128."""


@inner()
def row_scale(row: Floats, limit: float) -> Any:
    """Return the factor by which a row's inputs are multiplied, their bound, and the row's scale.

    Args:
        row: the inputs.
        limit: largest magnitude with a static scale; 0: the largest magnitude of the row.
    """
    # The bits of NaN are the largest, so a NaN makes the scale NaN.
    largest = float_of_bits(np.int64(largest_magnitude_bits(row)))
    bound = np.float32(np.inf)
    if largest < _MIN_SCALE:
        largest = _MIN_SCALE
    if limit > 0 and largest < np.inf:  # a scale of NaN or Inf propagates the error
        largest = bound = np.float32(limit)
    return _QMAX / largest, bound, largest / _QMAX


@inner()
def quantize_values(values: Floats, out: npt.NDArray[np.uint8], step: float, bound: float) -> None:
    """Write the quantized values of a row, or of a part of it, to `out`; see `row_scale`."""
    if bound < np.inf:
        for i in range(len(values)):
            clipped = min(max(values[i], -bound), bound)
            out[i] = np.uint8(bits_of_float(clipped * step + _ROUNDING))
    else:
        for i in range(len(values)):
            out[i] = np.uint8(bits_of_float(values[i] * step + _ROUNDING))


@inner()
def quantize_rows(
    x: Floats, qvalues: npt.NDArray[np.uint8], factors: Floats, limit: float, first: int, last: int
) -> None:
    """Quantize rows [first, last) of x [T, K] into `qvalues` [T, K] and scales `factors` [T].

    For `limit` see `row_scale`.
    """
    for t in range(first, last):
        step, bound, factors[t] = row_scale(x[t], limit)
        quantize_values(x[t], qvalues[t], step, bound)


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
