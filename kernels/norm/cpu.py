"""CPU loops of the RMS norm, compiled by numba.

The result for a row does not depend on other rows, because the squares of a row are summed in a
fixed order. Four vectors a, b, c and d accumulate squares in turn. The lanes of the vector
(a + b) + (c + d) are then added one after another. The squares of the remaining elements, which do
not fill four vectors, are added last.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import entry, load_entries, run_serial_or_parallel
from penstock.kernels.cpu_common.simd import VECTOR_WIDTH, fma, load_wide, splat_wide, store, vadd

Floats = npt.NDArray[np.float32]

_f32 = np.float32


@inner(fastmath={"contract"})
def _mean_square(x: Floats, at: int, width: int, spare: Floats) -> Any:
    """Return the mean of the squares of `x[at : at + width]`.

    `spare` is a scratch array [VECTOR_WIDTH].
    """
    a = b = c = d = splat_wide(_f32(0))
    whole = width - width % (4 * VECTOR_WIDTH)
    for i in range(at, at + whole, 4 * VECTOR_WIDTH):
        p, q = load_wide(x, i), load_wide(x, i + VECTOR_WIDTH)
        r, s = load_wide(x, i + 2 * VECTOR_WIDTH), load_wide(x, i + 3 * VECTOR_WIDTH)
        a, b, c, d = fma(p, p, a), fma(q, q, b), fma(r, r, c), fma(s, s, d)
    store(spare, 0, vadd(vadd(a, b), vadd(c, d)))
    total = _f32(0)
    for i in range(VECTOR_WIDTH):
        total += spare[i]
    for i in range(at + whole, at + width):
        total = fma(x[i], x[i], total)
    return total / _f32(width)


@inner()
def norm_row(
    x: Floats, at: int, more: Floats, more_at: int, weight: Floats, eps: float, out: Floats,
    out_at: int, spare: Floats,
) -> None:  # fmt: skip
    """Write the RMS norm of one row of `x` to `out`.

    If `more` is not empty, a row of `more` is first added to the row of `x`, in place. `spare` is a
    scratch array.
    """
    width = len(weight)
    row, normed = x[at : at + width], out[out_at : out_at + width]
    if len(more):
        added = more[more_at : more_at + width]
        for i in range(width):
            row[i] += added[i]
    scale = _f32(1) / np.sqrt(_mean_square(x, at, width, spare) + _f32(eps))
    for i in range(width):
        normed[i] = row[i] * scale * weight[i]


@inner(allocates=True)
def _some_rows(
    hidden: Floats, x: Floats, weight: Floats, eps: float, out: Floats, first: int, last: int
) -> None:
    width, spare = len(weight), np.empty(VECTOR_WIDTH, np.float32)
    for r in range(first, last):
        norm_row(hidden, r * width, x, r * width, weight, eps, out, r * width, spare)


_SIGNATURE = "void(float32[::1], float32[::1], float32[::1], float32, float32[::1]"


@entry(_SIGNATURE + ")")
def _serial(hidden: Floats, x: Floats, weight: Floats, eps: float, out: Floats) -> None:
    _some_rows(hidden, x, weight, eps, out, 0, len(out) // len(weight))


@entry(_SIGNATURE + ", int64)", parallel=True)
def _parallel(
    hidden: Floats, x: Floats, weight: Floats, eps: float, out: Floats, num_threads: int
) -> None:
    num_rows = len(out) // len(weight)
    for thread in numba.prange(num_threads):
        first, last = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        _some_rows(hidden, x, weight, eps, out, first, last)


def load() -> None:
    """Compile the loops, or load them from disk."""
    load_entries(_serial, _parallel)


def run(
    hidden: Floats, x: Floats, weight: Floats, eps: float, out: Floats, num_threads: int
) -> None:
    """Write the RMS norm of `hidden` to `out`. If `x` is not empty, first add `x` to `hidden`.

    `hidden`, `x` and `out` are flat arrays [T D].
    """
    run_serial_or_parallel(_serial, _parallel, hidden, x, weight, eps, out, num_threads=num_threads)
