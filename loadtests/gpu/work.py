"""Benchmark of one operation: times our implementation and other ones (peers)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from penstock.loadtests.gpu.clock import Call, time_calls
from penstock.loadtests.gpu.goals import Goal, Measured

COLD_CACHE_BYTES = 1 << 28
"""Number of bytes that one round of calls touches in total: more than fit in any cache."""

MAX_CALLS = 16


class Absent(Exception):
    """Raised if a peer implementation is not available. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class Work:
    """One operation to measure, which is one row of the result table.

    `ours` and each of `peers` allocate new memory and return a function to time. A peer that is not
    available raises Absent.
    """

    name: str
    goal: Goal
    num_bytes: float  # minimum number of bytes read and written per call
    num_flops: float  # FLOPs per call
    ours: Callable[[], Call]
    peers: dict[str, Callable[[], Call]] = field(default_factory=dict)
    warm: bool = False  # whether data may stay in the caches between calls

    def measure(self, device: torch.device) -> Measured:
        """Time all implementations.

        If a peer fails, the failure is recorded. If our implementation fails, the exception is
        raised.
        """
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
            except Exception as error:  # the benchmark continues if a peer fails
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
