"""Detects kernel fallbacks: operations on a GPU that should run as a Triton kernel but do not.

If a launcher has no kernel for its arguments (such as a dtype or a head size), it runs plain torch
operations on the GPU: correct but slow. If a tensor is on the CPU by mistake, the launcher runs its
CPU version, and the result is correct, too. This module reports both cases, so that tests and
benchmarks detect them.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_counts: Counter[str] = Counter()
_strict = False
_device: torch.device | None = None  # GPU on which all operations must run; None: any device


class KernelFallbackError(RuntimeError):
    """An operation would run without its Triton kernel while `forbid_fallback` is active."""


def record_fallback(operation: str, device: torch.device, why: str) -> None:
    """Count a launcher's use of plain torch; raise `KernelFallbackError` if this is forbidden.

    If `device` is a CPU, the function does nothing unless `forbid_fallback` requires a GPU.
    """
    if device.type == "cpu" and _device is None:
        return
    _counts[operation] += 1
    if _strict:
        raise KernelFallbackError(f"{operation} has no Triton kernel for {why}")


def check_device(tensor: Tensor) -> None:
    """Raise `KernelFallbackError` if `forbid_fallback` requires a GPU.

    Launchers call this function before they run their CPU version for `tensor`.
    """
    if _device is not None:
        raise KernelFallbackError(
            f"a tensor is on {tensor.device}, so no GPU kernel would compute it: expected {_device}"
        )


def fallback_counts() -> dict[str, int]:
    """Return for each operation how often it has run on a GPU without its Triton kernel."""
    return dict(_counts)


@contextmanager
def forbid_fallback(device: torch.device | None = None) -> Iterator[None]:
    """Raise `KernelFallbackError` within this context if an operation runs without its kernel.

    This applies to plain torch operations on a GPU. If `device` is a GPU, it also applies to CPU
    versions. The setting is global, so only one thread at a time may use it.
    """
    global _strict, _device
    before = _strict, _device
    _strict, _device = True, None if device is None or device.type == "cpu" else device
    try:
        yield
    finally:
        _strict, _device = before
