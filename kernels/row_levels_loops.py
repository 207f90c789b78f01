"""The loops of `row_levels`, compiled by numba. The first import on a machine compiles."""

import numba
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_LEVELS, _MIDDLE, _LEAST = np.float32(127), np.int32(128), np.float32(1e-30)


@numba.njit("void(float32[:,::1], uint8[:,::1], float32[::1])", nogil=True, cache=True)
def fill(x: Floats, levels: npt.NDArray[np.uint8], factors: Floats) -> None:
    """x [T, K], levels [T, K], factors [T]."""
    magnitudes = factors.view(np.int32)
    for t in range(len(x)):
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
