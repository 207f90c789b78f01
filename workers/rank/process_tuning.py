"""Sets OpenMP, malloc and NCCL options of worker processes; imports neither torch nor numba."""

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
_OLD_MMAP_THRESHOLD = 32 << 20


NCCL_VARIABLES = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_NVLS_ENABLE": "0",
}
"""Environment variables of torch's NCCL process groups and of CUDA. By default, an operation that
times out makes torch's NCCL watchdog end the whole process. But a lost peer must only end its
transfers, and the engine's own watchdog detects lost ranks. With the default of 8 connections,
streams share hardware queues, and a send may wait behind a receive of another pair. NVLink SHARP
(NVLS) adds in the switch, in an order that NCCL does not document; rings and trees add in a fixed
order, so that workers with the same mesh compute the same bits."""


def tune_process() -> None:
    """Set options of OpenMP, malloc and NCCL for an engine; call this once, before torch is loaded.

    Environment variables that the user has set are kept.
    """
    if not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS
    for name, value in NCCL_VARIABLES.items():
        os.environ.setdefault(name, value)
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
        # Before version 2.35, glibc refuses larger thresholds than `_OLD_MMAP_THRESHOLD`.
        if not mallopt(_MMAP_THRESHOLD, KEPT_BYTES):
            mallopt(_MMAP_THRESHOLD, _OLD_MMAP_THRESHOLD)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)
        mallopt(_TOP_PAD, _TOP_PAD_BYTES)
