"""Device work of KV transfers: one CUDA stream (lane) per direction; none on a CPU.

On a CPU, work runs immediately. No function here waits for the device. `Lane.mark` returns an
object that can be polled.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor


class Waitable(Protocol):
    """A condition that becomes true once and stays true."""

    def ready(self) -> bool: ...


class Lane:
    """A queue of device work for one direction. This class is for CPUs: work runs immediately."""

    def computing(self) -> AbstractContextManager[object]:
        """Return a context in which kernels are launched in this lane."""
        return nullcontext()

    def position(self) -> Waitable:
        """Return a mark that is reached after the work so far in the thread's current stream."""
        return REACHED

    def follow(self, position: Waitable) -> None:
        """Delay work that is launched later in this lane until `position` is reached."""

    def mark(self) -> Waitable:
        """Return a mark that is reached after the work launched so far in this lane."""
        return REACHED

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return a copy of a small tensor on the host; it is valid once a later mark is reached."""
        return tensor


class _Reached:
    def ready(self) -> bool:
        return True


REACHED: Waitable = _Reached()
"""A mark that is always reached."""


class CudaLane(Lane):
    """A lane with a CUDA stream of its own, parallel to the stream of the model's steps."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def computing(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def position(self) -> Waitable:
        return _Event(torch.cuda.current_stream(self._device))

    def follow(self, position: Waitable) -> None:
        assert isinstance(position, _Event)
        self._stream.wait_event(position.event)

    def mark(self) -> Waitable:
        return _Event(self._stream)

    def to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            return host.copy_(tensor, non_blocking=True)


class _Event:
    """A CUDA event that was recorded in a stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def ready(self) -> bool:
        return bool(self.event.query())


def make_lane(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else Lane()
