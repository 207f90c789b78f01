"""Detection of kernel fallbacks: operations that a Triton kernel should have computed, but did not.

On a GPU, a launcher that has no kernel for the arguments (a dtype, a head size) computes with plain
torch: correct but slow. A tensor that is on the CPU by mistake is computed by the CPU version, also
correctly. Both are reported here, so that tests and benchmarks do not miss them.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_taken: Counter[str] = Counter()
_strict = False
_device: torch.device | None = None  # GPU on which everything must run, if any


class KernelFallbackError(RuntimeError):
    """An operation would run without its Triton kernel although `forbid_fallback` is active."""


def record_fallback(operation: str, device: torch.device, why: str) -> None:
    """Count a launcher's use of plain torch, or raise `KernelFallbackError` if that is forbidden.

    Does nothing for a CPU, unless `forbid_fallback` requires another device.
    """
    if device.type == "cpu" and _device is None:
        return
    _taken[operation] += 1
    if _strict:
        raise KernelFallbackError(f"{operation} has no Triton kernel for {why}")


def check_device(tensor: Tensor) -> None:
    """Raise `KernelFallbackError` if `forbid_fallback` requires a GPU.

    Launchers call it before they run the CPU version for this tensor.
    """
    if _device is not None:
        raise KernelFallbackError(
            f"a tensor on {tensor.device} would not be computed by a kernel on {_device}"
        )


def fallback_counts() -> dict[str, int]:
    """Return how often each operation has run without its Triton kernel on a GPU."""
    return dict(_taken)


@contextmanager
def forbid_fallback(device: torch.device | None = None) -> Iterator[None]:
    """Raise `KernelFallbackError` within the context where an operation runs without its kernel.

    This applies to plain torch on a GPU and, if `device` is not a CPU, also to CPU versions. The
    setting is global: use it in one thread at a time.
    """
    global _strict, _device
    before = _strict, _device
    _strict, _device = True, None if device is None or device.type == "cpu" else device
    try:
        yield
    finally:
        _strict, _device = before
