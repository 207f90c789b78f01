"""Where an engine computes: on a CPU as it is called, on a GPU in streams of its own."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from penstock.workers.gpu.pinned import AsyncTokenCopy


class Streams:
    """One stream computes, in order; another brings tokens to the host meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self.asynchronous = device.type == "cuda"
        if self.asynchronous:
            torch.cuda.synchronize(device)  # weights and cache, made so far in no stream of ours
        self._computing = _stream(device)
        self._copying = _stream(device)

    def computing(self) -> AbstractContextManager[object]:
        """Within, whatever is launched computes after what was launched so before."""
        return nullcontext() if self._computing is None else torch.cuda.stream(self._computing)

    def copy_to_host(self, tokens: Tensor, finite: Tensor) -> AsyncTokenCopy:
        """Sends drawn tokens [S] int32 to the host, with whether they are any [S]."""
        return AsyncTokenCopy(tokens, finite, self._copying)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device)
