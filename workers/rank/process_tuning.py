"""Sets OpenMP and malloc options of worker processes; imports neither torch nor numba."""

import ctypes
import os
import sys
from contextlib import suppress

from penstock.kernels.cpu_common.numba_runtime import OPENMP

SPINS = "30000"
"""Iterations that an OpenMP thread spins for new work before it sleeps. The default, 300,000, keeps
the core busy for some milliseconds. With 1,000 iterations, threads sleep whenever a linear layer
begins; this made a step a fifth longer (docs/performance.md)."""

KEPT_BYTES = 1 << 30
"""Freed memory that malloc keeps, so that a step's tensors need no new pages from the kernel."""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # parameters of mallopt
_TOP_PAD_BYTES = 64 << 20


def tune_process() -> None:
    """Tune OpenMP spin-waiting and malloc for an engine; call this once, before torch is loaded.

    Environment variables that the user has set are kept.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
    # Use pages of 2 MiB, so that attention waits less for TLB misses.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Load one OpenMP for both torch and numba; otherwise their two thread pools compete for cores.
    with suppress(OSError):
        ctypes.CDLL(OPENMP)
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        _keep_memory()


def _keep_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # mallopt exists only in glibc
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_TOP_PAD, _TOP_PAD_BYTES)
