"""A benchmark of one operation: our implementation and those of peers, on equal sizes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from penstock.loadtests.gpu.clock import Call, time_calls
from penstock.loadtests.gpu.goals import Goal, Measured

COLD_CACHE_BYTES = 1 << 28
"""Bytes that one round of calls touches in total: more than any cache holds."""

MAX_CALLS = 16


class Absent(Exception):
    """A peer implementation is not available; the message says why."""


@dataclass(frozen=True, slots=True)
class Work:
    """One row of the table of results.

    `ours` and each of `peers` return a new call on newly allocated memory; a peer raises Absent
    if it is not available.
    """

    name: str
    goal: Goal
    num_bytes: float  # minimum bytes read and written per call
    num_flops: float  # per call
    ours: Callable[[], Call]
    peers: dict[str, Callable[[], Call]] = field(default_factory=dict)
    warm: bool = False  # data may stay in the caches between calls

    def measure(self, device: torch.device) -> Measured:
        """Time all implementations; record failures of peers, raise our own."""
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
            except Exception as error:  # a failing peer must not stop the benchmark
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
