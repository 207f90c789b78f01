"""CPU loops of `quantize_blocks`, compiled by numba."""

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.magnitude import largest_magnitude_bits
from penstock.kernels.cpu_common.numba_runtime import entry, load_entries, run_serial_or_parallel
from penstock.kernels.cpu_common.simd import float_of_bits
from penstock.kernels.linear.int8_blocks import BLOCK_INPUTS

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.int8]
Ints = npt.NDArray[np.int32]

_QMAX, _MIN_SCALE = np.float32(127), np.float32(1e-30)


@inner()
def quantize_blocks(
    x: Floats, qvalues: Bytes, scales: Floats, offsets: Ints, num_inputs: int, run: int,
    first: int, last: int,
) -> None:  # fmt: skip
    """Quantize rows [first, last). The arrays are those of `_serial`."""
    num_blocks, num_runs = -(-num_inputs // BLOCK_INPUTS), -(-num_inputs // run)
    for t in range(first, last):
        for block in range(num_blocks):
            begin, end = block * BLOCK_INPUTS, min(num_inputs, (block + 1) * BLOCK_INPUTS)
            row = x[t * num_inputs + begin : t * num_inputs + end]
            out = qvalues[t * num_inputs + begin : t * num_inputs + end]
            largest = float_of_bits(np.int64(largest_magnitude_bits(row)))
            if largest < _MIN_SCALE:
                largest = _MIN_SCALE
            step = _QMAX / largest
            for i in range(len(row)):
                out[i] = np.int8(np.int32(np.rint(row[i] * step)))
            scales[t * num_blocks + block] = largest / _QMAX
        for number in range(num_runs):
            begin = t * num_inputs + number * run
            values = qvalues[begin : min(begin + run, (t + 1) * num_inputs)]
            total = np.int32(0)
            for i in range(len(values)):
                total += np.int32(values[i])
            offsets[t * num_runs + number] = -total


_SIGNATURE = "void(float32[::1], int8[::1], float32[::1], int32[::1], int64, int64, int64"


@entry(_SIGNATURE + ")")
def _serial(
    x: Floats,  # [T * K]: T rows of K inputs
    qvalues: Bytes,  # [T * K] result
    scales: Floats,  # [T * blocks] result: scale of each block
    offsets: Ints,  # [T * runs] result: minus the sum of each run
    num_inputs: int,
    run: int,
    num_rows: int,
) -> None:
    quantize_blocks(x, qvalues, scales, offsets, num_inputs, run, 0, num_rows)


@entry(_SIGNATURE + ", int64)", parallel=True)
def _parallel(
    x: Floats, qvalues: Bytes, scales: Floats, offsets: Ints, num_inputs: int, run: int,
    num_rows: int, num_threads: int,
) -> None:  # fmt: skip
    for thread in numba.prange(num_threads):
        first, last = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        quantize_blocks(x, qvalues, scales, offsets, num_inputs, run, first, last)


def load() -> None:
    """Compile the loops, or load them from the cache on disk."""
    load_entries(_serial, _parallel)


def run(*given: object, num_threads: int) -> None:
    """Quantize rows with `num_threads` threads. `given` are the arguments of `_serial`."""
    run_serial_or_parallel(_serial, _parallel, *given, num_threads=num_threads)
