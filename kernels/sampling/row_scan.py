"""The largest element of each row of logits, and whether the row may be sampled, on a CPU.

A loop compiled by numba reads each row once, and divides the rows among the threads. numpy reads
each row twice, with one thread.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.cpu_common.deferred_loops import is_deferred
from penstock.kernels.cpu_common.numba_runtime import (
    MIN_PARALLEL_ELEMENTS,
    configure_numba,
    has_numba,
)

LOOPS = "scans"
"""Name of the group of compiled loops, see `kernels/cpu_compilation.py`."""


class RowScan(NamedTuple):
    """Results of `scan_rows` for R rows."""

    tokens: npt.NDArray[np.int64]  # [R] index of the (first) largest element; undefined with NaN
    finite: npt.NDArray[np.bool_]  # [R] True for rows without NaN and infinite elements
    # [R] True for rows without NaN whose largest element is finite. Others may be -inf.
    largest_is_finite: npt.NDArray[np.bool_]


def scan_rows(logits: Tensor) -> RowScan:
    """Find the largest element of each row of `logits`.

    `logits` are [R, V] float32 on a CPU. V must be at least 1.
    """
    if not (has_numba() and logits.is_contiguous()) or is_deferred(LOOPS):
        return scan_rows_reference(logits)
    num_rows = len(logits)
    scan = RowScan(
        np.empty(num_rows, np.int64), np.empty(num_rows, np.bool_), np.empty(num_rows, np.bool_)
    )
    is_small = num_rows == 1 or logits.numel() < MIN_PARALLEL_ELEMENTS
    _cpu_kernels().run(logits.numpy(), *scan, 1 if is_small else torch.get_num_threads())
    return scan


def scan_rows_reference(logits: Tensor) -> RowScan:
    """Reference for `scan_rows`, with numpy; also used while the loops are not compiled."""
    values = logits.numpy()
    tokens = values.argmax(-1)
    largest = values[np.arange(len(values)), tokens]  # NaN if the row contains NaN
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(values.sum(-1))
    if not finite.all():  # the sum may overflow although all elements are finite
        finite = np.isfinite(values).all(-1)
    return RowScan(tokens, finite, np.isfinite(largest))


def load_cpu_kernels() -> None:
    """Load the compiled loops, compiling them if they are not in the cache on disk."""
    if has_numba():
        _cpu_kernels().load()


@cache
def _cpu_kernels() -> Any:
    configure_numba()
    from penstock.kernels.sampling import cpu_row_scan

    return cpu_row_scan
