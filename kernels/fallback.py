"""Which form of an operation its launcher took, where it should have been the kernel.

On a GPU a launcher without a kernel for what it is asked (a dtype, a head size) computes in plain
torch: right, and slow. And what was left on the CPU by mistake has a CPU's form, which is as right.
Both say so here, so that nobody measures or tests the wrong thing without knowing.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_taken: Counter[str] = Counter()
_strict = False
_device: torch.device | None = None  # that all has to be computed on


class KernelFallbackError(RuntimeError):
    """Where only kernels may compute, an operation would have been computed without its kernel."""


def record_fallback(operation: str, device: torch.device, why: str) -> None:
    """To be called by a launcher that takes its torch form; where a CPU is meant, nothing."""
    if device.type == "cpu" and _device is None:
        return
    _taken[operation] += 1
    if _strict:
        raise KernelFallbackError(f"{operation} has no kernel for this: {why}")


def check_device(tensor: Tensor) -> None:
    """To be called by a launcher that takes no kernel for this tensor."""
    if _device is not None:
        raise KernelFallbackError(
            f"what is on {tensor.device} would not be computed by a kernel on {_device}"
        )


def fallback_counts() -> dict[str, int]:
    """How often each operation was computed without its kernel on a GPU, so far."""
    return dict(_taken)


@contextmanager
def forbid_fallback(device: torch.device | None = None) -> Iterator[None]:
    """Within, `KernelFallbackError` ends whatever takes a plain form on a GPU; and, if `device` is
    none of a CPU, whatever takes the form of one. For one thread at a time."""
    global _strict, _device
    before = _strict, _device
    _strict, _device = True, None if device is None or device.type == "cpu" else device
    try:
        yield
    finally:
        _strict, _device = before
