"""Arrays on their way between host and device, while both go on."""

from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


def pinned(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """A copy in memory that the device reads by itself: a copy from it need not wait.

    torch keeps such memory from being used again until the device has read it.
    """
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def put(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """An array on the device, once the device gets to it."""
    return pinned(array, device).to(device, non_blocking=True)


class AsyncTokenCopy:
    """Drawn tokens on their way to the host, while the device goes on computing.

    tokens: [S] int32; finite: [S] bool. `copying`: the stream that copies, on CUDA.
    """

    def __init__(
        self, tokens: Tensor, finite: Tensor, copying: "torch.cuda.Stream | None" = None
    ) -> None:
        marked = torch.where(finite, tokens, _NOT_FINITE)  # in one copy
        self._event: torch.cuda.Event | None = None
        if copying is None:
            self._host = marked
            return
        drawn = torch.cuda.Event()
        drawn.record()  # on the stream that computes
        self._host = torch.empty(marked.shape, dtype=marked.dtype, pin_memory=True)
        with torch.cuda.stream(copying):
            copying.wait_event(drawn)
            self._host.copy_(marked, non_blocking=True)
            marked.record_stream(copying)  # or its memory would be used again before it is read
            self._event = torch.cuda.Event()
            self._event.record(copying)

    def wait(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """The tokens [S] int32, 0 where they were not finite, and whether they were [S]."""
        if self._event is not None:
            self._event.synchronize()
        marked = self._host.numpy()
        finite = marked != _NOT_FINITE
        return marked * finite, finite


_NOT_FINITE = -1
