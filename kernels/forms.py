"""Which form of an operation its launcher took, where it should have been the kernel.

On a GPU a launcher without a kernel for what it is asked (a dtype, a head size) computes in plain
torch: right, and slow. It says so here, so that nobody measures the wrong thing without knowing.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_taken: Counter[str] = Counter()
_strict = False


class NoKernel(RuntimeError):
    """On a GPU an operation would have been computed without its kernel."""


def plain_form(operation: str, device: torch.device, why: str) -> None:
    """To be called by a launcher that takes its torch form; on a CPU, nothing."""
    if device.type == "cpu":
        return
    _taken[operation] += 1
    if _strict:
        raise NoKernel(f"{operation} has no kernel for this: {why}")


def plain_forms() -> dict[str, int]:
    """How often each operation was computed without its kernel on a GPU, so far."""
    return dict(_taken)


@contextmanager
def kernels_only() -> Iterator[None]:
    """Within, `NoKernel` ends whatever takes a plain form on a GPU. For one thread at a time."""
    global _strict
    before, _strict = _strict, True
    try:
        yield
    finally:
        _strict = before
