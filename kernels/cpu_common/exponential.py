"""The exponential function of CPU loops, compiled by numba."""

# mypy: disable-error-code="no-untyped-call"

import math
from typing import Any

import numpy as np

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.simd import float_of_bits, fma

_f32 = np.float32
_LOG2_E = _f32(math.log2(math.e))
# Coefficients of the Taylor series of 2^f = exp(f ln 2).
# For f in [-1/2, 1/2], the series is wrong in the last bit at most.
_C1, _C2, _C3, _C4, _C5, _C6, _C7 = (
    _f32(math.log(2) ** n / math.factorial(n)) for n in range(1, 8)
)


@inner(fastmath=False)  # by default, numba passes on the flags of the first caller
def exp(x: Any) -> Any:
    """Return e^x of a float32 x <= 0. Results below 2^-126.5 become 0, and NaN stays NaN.

    LLVM can vectorize loops that call this function. The operations and their order are the same in
    every loop, and so are the results.
    """
    t = x * _LOG2_E
    if t < _f32(-127):  # not max(), because max() may replace a NaN by -127
        t = _f32(-127)
    n = np.floor(t + _f32(0.5))
    f = t - n
    p = fma(f, fma(f, fma(f, _C7, _C6), _C5), _C4)
    p = fma(f, fma(f, fma(f, fma(f, p, _C3), _C2), _C1), _f32(1))
    return p * float_of_bits((np.int32(n) + np.int32(127)) << np.int32(23))
