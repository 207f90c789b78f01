"""CUDA streams of an engine. On a CPU there are no streams, and operations run immediately."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from penstock.workers.gpu.pinned import AsyncTokenCopy


class Streams:
    """A stream for the model's kernels, and a parallel stream for copies of tokens to the host."""

    def __init__(self, device: torch.device) -> None:
        self.asynchronous = device.type == "cuda"
        if self.asynchronous:
            # wait for the default stream, which created weights and cache
            torch.cuda.synchronize(device)
        self._computing = _stream(device)
        self._copying = _stream(device)

    def computing(self) -> AbstractContextManager[object]:
        """Return a context in which kernels are launched on the compute stream."""
        return nullcontext() if self._computing is None else torch.cuda.stream(self._computing)

    def copy_to_host(self, tokens: Tensor, finite: Tensor) -> AsyncTokenCopy:
        """Start copying sampled tokens [S] int32 to the host; `finite` [S] is True if valid."""
        return AsyncTokenCopy(tokens, finite, self._copying)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)
