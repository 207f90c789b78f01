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
# GPU on which all operations must run, or None if they may run on any device
_device: torch.device | None = None


class KernelFallbackError(RuntimeError):
    """Raised if an operation would run without its Triton kernel during `forbid_fallback`."""


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
    """Return how often each operation ran on a GPU without its Triton kernel."""
    return dict(_counts)


@contextmanager
def forbid_fallback(device: torch.device | None = None) -> Iterator[None]:
    """Raise `KernelFallbackError` within this context if an operation runs without its kernel.

    The error is raised if plain torch operations would run on a GPU. If `device` is a GPU, the
    error is also raised if the CPU version of an operation would run. The setting is global, so
    only one thread at a time may use the context.
    """
    global _strict, _device
    before = _strict, _device
    _strict, _device = True, None if device is None or device.type == "cpu" else device
    try:
        yield
    finally:
        _strict, _device = before
