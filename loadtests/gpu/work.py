"""An operation to be timed: ours, and each peer's form of it, on the same sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from penstock.loadtests.gpu.clock import Call, time_calls
from penstock.loadtests.gpu.goals import Goal, Measured

COLD_CACHE_BYTES = 1 << 28
"""That a turn of calls touches together: more than any cache holds."""

MAX_CALLS = 16


class Absent(Exception):
    """A peer that is not to be had here; the message says why."""


@dataclass(frozen=True, slots=True)
class Work:
    """One row of the table.

    `ours` and each of `peers` makes a call on memory of its own, whenever it is asked for one;
    peers raise `Absent` where they cannot.
    """

    name: str
    goal: Goal
    num_bytes: float  # read and written by a call, at least
    num_flops: float
    ours: Callable[[], Call]
    peers: dict[str, Callable[[], Call]] = field(default_factory=dict)
    warm: bool = False  # everything may stay in a cache

    def measure(self, device: torch.device) -> Measured:
        """Times all. What a peer cannot do is noted; what ours cannot, raised."""
        num_cold_calls = min(MAX_CALLS, max(1, round(COLD_CACHE_BYTES / self.num_bytes)))
        num_calls = 1 if self.warm or device.type == "cpu" else num_cold_calls
        own = time_calls(_calls(self.ours, num_calls), device)
        peers: dict[str, float] = {}
        absent: dict[str, str] = {}
        for name, make in self.peers.items():
            try:
                peers[name] = time_calls(_calls(make, num_calls), device).median
            except (Absent, ImportError) as error:
                absent[name] = str(error)
            except Exception as error:  # a peer's failure is its own
                absent[name] = f"{type(error).__name__}: {error}"
        return Measured(
            self.name,
            self.goal,
            self.num_bytes,
            self.num_flops,
            own.median,
            own.captured,
            peers,
            absent,
        )


def _calls(make: Callable[[], Call], count: int) -> Sequence[Call]:
    return [make() for _ in range(count)]
