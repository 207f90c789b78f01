"""Performance goals of operations, and the check whether a measurement meets its goal."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.loadtests.gpu.bounds import Bounds


@dataclass(frozen=True, slots=True)
class Goal:
    """Performance limits of an operation. Every limit that is not None must be met."""

    most_us: float | None = None  # maximum time of a call, in microseconds
    least_fraction: float | None = None  # minimum speed as a fraction of the device's limits
    least_tflops: float | None = None
    least_of_peer: float | None = None  # minimum speed as a fraction of the fastest peer's speed
    over_plain: float | None = None  # minimum speedup over PLAIN, our own simple implementation

    def __str__(self) -> str:
        limits = (
            (self.most_us, "{:.0f} µs or less"),
            (self.least_fraction, "{:.0%} of the bound"),
            (self.least_tflops, "{:.0f} TFLOP/s"),
            (self.least_of_peer, "{:.2f} of the best peer"),
            (self.over_plain, "{:.0f}x our plain form"),
        )
        return ", ".join(text.format(value) for value, text in limits if value is not None)


PLAIN = "ours, plain"


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurement of one operation, with its goal."""

    name: str
    goal: Goal
    num_bytes: float
    num_flops: float
    seconds: float
    captured: bool  # whether a CUDA graph was timed (see `Timing`)
    peers: Mapping[str, float]  # seconds per call of each peer, by its name
    absent: Mapping[str, str]  # for each peer that could not be measured, the reason

    def figures(self, bounds: Bounds) -> dict[str, Any]:
        """Return the measurement as JSON values."""
        floor = bounds.floor(self.num_bytes, self.num_flops)
        rivals = {name: seconds for name, seconds in self.peers.items() if name != PLAIN}
        best = min(rivals.items(), key=lambda pair: pair[1], default=None)
        return {
            "name": self.name,
            "goal": str(self.goal),
            "met": self.met(bounds),
            "us": self.seconds * 1e6,
            "floor_us": floor * 1e6,
            "share": floor / self.seconds,
            "tflops": self.num_flops / self.seconds / 1e12,
            "captured": self.captured,
            "peers_us": {name: seconds * 1e6 for name, seconds in self.peers.items()},
            "absent": dict(self.absent),
            "best_peer": None if best is None else best[0],
            "of_best_peer": None if best is None else best[1] / self.seconds,
        }

    def met(self, bounds: Bounds) -> bool | None:
        """Return whether all limits of the goal are met; None if a limit could not be checked."""
        goal, floor = self.goal, bounds.floor(self.num_bytes, self.num_flops)
        rivals = [seconds for name, seconds in self.peers.items() if name != PLAIN]
        reached = (
            (goal.most_us, goal.most_us and self.seconds * 1e6 <= goal.most_us),
            (
                goal.least_fraction,
                None if math.isnan(floor) else floor >= (goal.least_fraction or 0) * self.seconds,
            ),
            (goal.least_tflops, self.num_flops >= (goal.least_tflops or 0) * 1e12 * self.seconds),
            (
                goal.least_of_peer,
                min(rivals) >= (goal.least_of_peer or 0) * self.seconds if rivals else None,
            ),
            (
                goal.over_plain,
                self.peers[PLAIN] >= (goal.over_plain or 0) * self.seconds
                if PLAIN in self.peers
                else None,
            ),
        )
        results = [result for wanted, result in reached if wanted is not None]
        if False in results:
            return False
        return None if None in results else True
