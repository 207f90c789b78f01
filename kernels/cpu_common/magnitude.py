"""Finds the largest absolute value of an array, to quantize it or to detect NaN and infinity."""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.late_codegen import inner

MAGNITUDE = np.int32(0x7FFFFFFF)
"""Mask of the bits of a float32 without its sign."""

INFINITY = np.int32(0x7F800000)
"""Bits of infinity. Those of NaN, without the sign, are larger."""


@inner()
def largest_magnitude_bits(values: npt.NDArray[np.float32]) -> Any:
    """Return the bits of the largest absolute value as an int32; 0 if there are no values.

    Absolute values are compared as integers, because their bits have the same order as the floats.
    The bits of NaN are the largest. The casts keep the integers at 32 bits: numba would extend
    them, and a vector would contain half as many.
    """
    bits, most = values.view(np.int32), np.int32(0)
    for i in range(len(bits)):
        most = np.int32(max(most, np.int32(bits[i] & MAGNITUDE)))
    return most
