"""CPU loops of the gated activations, compiled by numba.

The result for an element does not depend on the element's index. LLVM makes a vector loop and a
loop over the remaining elements; the two loops execute the same operations, and both fuse
multiply-adds.
"""

# mypy: disable-error-code="no-untyped-call"

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.attention.cpu_inner import exp
from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import entry, load_entries, run_serial_or_parallel

Floats = npt.NDArray[np.float32]

_f32 = np.float32

COLUMNS_AT_ONCE = 512
"""Maximum number of columns per call of `gate_columns`."""

_SLOPE, _BEND = _f32(2 * np.sqrt(2 / np.pi)), _f32(0.044715)


@inner(fastmath={"contract"})
def gate_columns(x: Floats, up: Floats, out: Floats, is_gelu: bool, scratch: Floats) -> None:
    """Compute out = x / (1 + e^-u) * up for at most COLUMNS_AT_ONCE columns.

    For silu, u = x. For gelu, u = 2 sqrt(2 / pi) (x + 0.044715 x^3). `scratch` is an array of
    3 * COLUMNS_AT_ONCE elements.
    """
    size = len(x)
    bent, far = scratch[:size], scratch[COLUMNS_AT_ONCE:][:size]
    powers = scratch[2 * COLUMNS_AT_ONCE :][:size].view(np.int32)
    for i in range(size):
        bent[i] = x[i]
    if is_gelu:
        for i in range(size):
            bent[i] = x[i] * (_SLOPE + _SLOPE * _BEND * x[i] * x[i])
    for i in range(size):
        far[i] = -abs(bent[i])
    exp(far, powers)
    for i in range(size):
        above = far[i] if bent[i] < 0 else _f32(1)
        bent[i] = above / (_f32(1) + far[i])
    for i in range(size):
        out[i] = x[i] * bent[i] * up[i]


@inner(allocates=True)
def _some_rows(
    gate_up: Floats, inner: int, is_gelu: bool, out: Floats, first: int, last: int
) -> None:
    scratch = np.empty(3 * COLUMNS_AT_ONCE, np.float32)
    for t in range(first, last):
        for begin in range(0, inner, COLUMNS_AT_ONCE):
            at, size = 2 * t * inner + begin, min(COLUMNS_AT_ONCE, inner - begin)
            gate_columns(
                gate_up[at : at + size], gate_up[at + inner :][:size],
                out[t * inner + begin :][:size], is_gelu, scratch,
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
