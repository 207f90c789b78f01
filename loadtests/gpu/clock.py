"""How long something takes on a device: many calls from one captured graph, where it has such."""

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
    """Marks moments of a device's own time."""

    def mark(self) -> Any: ...
    def seconds(self, begin: Any, end: Any) -> float: ...


class CudaClock:
    """Moments of the current stream: a mark is reached when all before it is computed."""

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000


class HostClock:
    """Where the host computes itself."""

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


def clock_of(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else HostClock()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call: of several rounds the middle one, the least and the most."""

    median: float
    least: float
    most: float
    captured: bool  # whether the calls came from a graph; else launching them may be in it


def time_calls(calls: Sequence[Call], device: torch.device) -> Timing:
    """calls: the same operation on different memory, in turns, so that no cache holds it all."""
    clock, (play, captured) = clock_of(device), _player(calls, device)
    play()
    repeats = max(1, round(ROUND_SECONDS / max(_seconds(clock, play, 1), 1e-7)))
    num_rounds = NUM_ROUNDS if device.type == "cuda" else 1  # a CPU only tries the command
    rounds = sorted(_seconds(clock, play, repeats) / len(calls) for _ in range(num_rounds))
    return Timing(statistics.median(rounds), rounds[0], rounds[-1], captured)


def _seconds(clock: Clock, play: Call, repeats: int) -> float:
    begin = clock.mark()
    for _ in range(repeats):
        play()
    return clock.seconds(begin, clock.mark()) / repeats


def _player(calls: Sequence[Call], device: torch.device) -> tuple[Call, bool]:
    """What makes all calls once, and whether from a graph."""

    def all_of_them() -> None:
        for call in calls:
            call()

    if device.type != "cuda":
        return all_of_them, False
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        all_of_them()  # compiles, and sets libraries up
        all_of_them()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            all_of_them()
    except RuntimeError:  # a peer that waits for the device
        torch.cuda.synchronize(device)
        return all_of_them, False
    return graph.replay, True
