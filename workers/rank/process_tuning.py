"""What a worker's process asks of the C libraries under it. Loads none of them: see `settle`."""

import ctypes
import os
import sys
from contextlib import suppress

from penstock.kernels.cpu_common.numba_runtime import OPENMP

SPINS = "30000"
"""Turns that an OpenMP thread waits for the next piece of work before it sleeps. By default it is
300,000, some milliseconds, all of them taken from whoever else wants the core; with 1,000 it is
asleep whenever a product begins, which made a step a fifth longer (docs/performance.md)."""

KEPT_BYTES = 1 << 30
"""Of freed memory; a step's tensors would else be asked of the kernel, page by page, every time."""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # of mallopt
_TOP_PAD_BYTES = 64 << 20


def tune_process() -> None:
    """Tunes waiting and memory for an engine. Once, before torch is loaded; a user's own settings
    in the environment stay."""
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
    # Reading memory in pages of 2 MiB, attention waits less for the tables of smaller ones.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    # Or there are two pools of threads, torch's own and numba's, in each other's way.
    with suppress(OSError):
        ctypes.CDLL(OPENMP)
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        _keep_memory()


def _keep_memory() -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, KEPT_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_TOP_PAD, _TOP_PAD_BYTES)
