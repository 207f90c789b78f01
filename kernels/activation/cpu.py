"""CPU loops of the gated activations, compiled by numba.

The result for an element does not depend on the element's index. LLVM makes a vector loop and a
loop over the remaining elements, and both execute the same operations.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.exponential import exp
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import entry, load_entries, run_serial_or_parallel
from penstock.kernels.cpu_common.simd import fma

Floats = npt.NDArray[np.float32]

_f32 = np.float32

_SLOPE, _BEND = _f32(2 * np.sqrt(2 / np.pi)), _f32(0.044715)


@inner(error_model="numpy")  # LLVM does not vectorize loops that check for a division by zero
def _gated(x: Any, up: Any, u: Any) -> Any:
    """Return x / (1 + e^-u) * up."""
    e = exp(-abs(u))
    above = e if u < 0 else _f32(1)
    return x * (above / (_f32(1) + e)) * up


@inner()
def gate_columns(x: Floats, up: Floats, out: Floats, is_gelu: bool) -> None:
    """Write the gated activation x / (1 + e^-u) * up to `out`.

    For silu, u = x. For gelu, u = 2 sqrt(2 / pi) (x + 0.044715 x^3).
    """
    if is_gelu:
        for i in range(len(x)):
            u = x[i] * fma(_SLOPE * _BEND * x[i], x[i], _SLOPE)
            out[i] = _gated(x[i], up[i], u)
    else:
        for i in range(len(x)):
            out[i] = _gated(x[i], up[i], x[i])


@inner()
def _some_rows(
    gate_up: Floats, inner: int, is_gelu: bool, out: Floats, first: int, last: int
) -> None:
    for t in range(first, last):
        at = 2 * t * inner
        gate_columns(
            gate_up[at : at + inner], gate_up[at + inner : at + 2 * inner],
            out[t * inner : (t + 1) * inner], is_gelu,
        )  # fmt: skip


@entry("void(float32[::1], int64, boolean, float32[::1])")
def _serial(gate_up: Floats, inner: int, is_gelu: bool, out: Floats) -> None:
    _some_rows(gate_up, inner, is_gelu, out, 0, len(out) // inner)


@entry(
    "void(float32[::1], int64, boolean, float32[::1], int64)",
    parallel=True,
)
def _parallel(gate_up: Floats, inner: int, is_gelu: bool, out: Floats, num_threads: int) -> None:
    num_rows = len(out) // inner
    for thread in numba.prange(num_threads):
        first, last = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        _some_rows(gate_up, inner, is_gelu, out, first, last)


def load() -> None:
    """Compile the loops, or load them from disk."""
    load_entries(_serial, _parallel)


def run(gate_up: Floats, inner: int, is_gelu: bool, out: Floats, num_threads: int) -> None:
    """Write the gated activation of `gate_up` to `out`.

    `gate_up` is [T, 2 inner] and `out` is [T, inner]; both are passed as flat arrays.
    """
    run_serial_or_parallel(
        _serial, _parallel, gate_up, inner, is_gelu, out, num_threads=num_threads
    )
