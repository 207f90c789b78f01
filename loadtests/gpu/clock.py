"""Times operations on a device.

On CUDA, many calls are replayed from one captured graph.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Call = Callable[[], object]

NUM_ROUNDS = 7
ROUND_SECONDS = 0.02


class Clock(Protocol):
    """Measures time on a device."""

    def mark(self) -> Any: ...  # returns the current point in time
    def seconds(self, begin: Any, end: Any) -> float: ...  # returns the seconds between two marks


class CudaClock:
    """Clock made of CUDA events on the current stream.

    A mark is the time at which all work queued before the mark has completed.
    """

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class HostClock:
    """Wall clock of the host, for work on the CPU."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def clock_of(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return CudaClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per call: median, minimum and maximum over several rounds."""

    median: float
    least: float
    most: float
    captured: bool  # whether a CUDA graph was timed; if not, times may include launch overhead


def time_calls(
    calls: Sequence[Call],
    device: torch.device,
    num_rounds: int = NUM_ROUNDS,
    round_seconds: float = ROUND_SECONDS,
) -> Timing:
    """Time an operation.

    Args:
        calls: functions that run the operation on different memory. They are called one after
            another, so that their data together can exceed the caches.
        num_rounds: number of measurements on a GPU.
        round_seconds: approximate duration of a measurement.
    """
    clock, (play, captured) = clock_of(device), _player(calls, device)
    play()
    repeats = max(1, round(round_seconds / max(_seconds(clock, play, 1), 1e-7)))
    # A run on the CPU only tests this code, so a short measurement is enough.
    if device.type != "cuda":
        num_rounds = repeats = 1
    rounds = sorted(_seconds(clock, play, repeats) / len(calls) for _ in range(num_rounds))
    return Timing(statistics.median(rounds), rounds[0], rounds[-1], captured)


def _seconds(clock: Clock, play: Call, repeats: int) -> float:
    begin = clock.mark()
    for _ in range(repeats):
        play()
    return clock.seconds(begin, clock.mark()) / repeats


def _player(calls: Sequence[Call], device: torch.device) -> tuple[Call, bool]:
    """Return a function that makes all calls once, and whether it replays a CUDA graph."""

    def all_of_them() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return all_of_them, False
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        all_of_them()  # the first calls compile kernels and initialize libraries
        all_of_them()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            all_of_them()
    except RuntimeError:  # a capture fails if the operation synchronizes with the host
        torch.cuda.synchronize(device)
        return all_of_them, False
    return graph.replay, True
