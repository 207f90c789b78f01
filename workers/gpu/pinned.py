"""Asynchronous copies of arrays between host and device."""

import os
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def pinned(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor; for a GPU in pinned memory, to allow asynchronous copies.

    torch does not reuse the pinned memory until the device has read the tensor.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def put(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Copy an array to the device without waiting for the copy."""
    if device.type == "cpu":
        return torch.from_numpy(array)
    return pinned(array, device).to(device, non_blocking=True)


class AsyncTokenCopy:
    """An asynchronous copy of sampled tokens to the host, parallel to the device's next kernels.

    Args:
        tokens: [S] int32.
        finite: [S] bool, False for invalid rows.
        copying: CUDA stream for the copy; None on a CPU.
    """

    def __init__(
        self, tokens: Tensor, finite: Tensor, copying: "torch.cuda.Stream | None" = None
    ) -> None:
        # one tensor holds tokens and validity, so that one copy suffices
        marked = torch.where(finite, tokens, _NOT_FINITE)
        self._event: torch.cuda.Event | None = None
        if copying is None:
            self._host = marked
            return
        drawn = torch.cuda.Event()
        drawn.record()  # recorded on the current stream, which is the compute stream
        self._host = torch.empty(marked.shape, dtype=marked.dtype, pin_memory=True)
        with torch.cuda.stream(copying):
            copying.wait_event(drawn)
            self._host.copy_(marked, non_blocking=True)
            marked.record_stream(copying)  # keeps the memory of `marked` until the copy is done
            self._event = torch.cuda.Event(blocking=has_few_cores())
            self._event.record(copying)

    def wait(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Wait for the copy; return tokens [S] int32 (0 if invalid) and `finite` [S] bool."""
        if self._event is not None:
            self._event.synchronize()
        marked = self._host.numpy()
        finite = marked != _NOT_FINITE
        return marked * finite, finite


_NOT_FINITE = -1

SPIN_CORES = 4
"""Minimum number of usable cores with which a thread may spin while it waits for the device."""


@cache
def has_few_cores() -> bool:
    """Return whether threads that wait for the device must sleep, to leave the cores to others.

    If there are at least `SPIN_CORES` cores, the threads spin, because a spinning wait ends a few
    microseconds earlier.
    """
    return usable_cores() < SPIN_CORES


def usable_cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> float:
    """Return the number of usable cores: the smaller of the CPU set and the cgroup's quota."""
    if sys.platform == "linux":
        cores = float(len(os.sched_getaffinity(0)))
    else:
        cores = float(os.cpu_count() or 1)
    # there is no quota if the file is missing or contains "max"
    with suppress(OSError, ValueError):
        used, period = quota.read_text("ascii").split()
        cores = min(cores, float(used) / float(period))
    return cores
