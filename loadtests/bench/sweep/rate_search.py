"""Searches for the highest request rate that a server sustains; pure code without I/O.

The search doubles the rate until a step misses the goals, or halves it until a step keeps them.
Bisection on a logarithmic scale then narrows the interval between the knee (see `RateSearch.knee`)
and the lowest rate that missed the goals, until the ratio of the two is at most `precision`.
"""

import math
from dataclasses import dataclass, field

MAX_STEPS = 24
MIN_RATIO = 1 / 64
"""The search ends without a result if the rate falls below this fraction of the first rate.
"""


@dataclass(slots=True)
class RateSearch:
    """A search for the highest sustained rate.

    Usage: call `next_rate`, measure a step at the returned rate, call `record`, and repeat this
    until `next_rate` returns None.
    """

    first: float  # first rate, in requests per second
    precision: float = 1.1
    kept: list[float] = field(default_factory=list)  # rates at which the goals were kept
    missed: list[float] = field(default_factory=list)

    @property
    def knee(self) -> float | None:
        """Highest rate that kept the goals and is below every rate that missed them, or None."""
        ceiling = min(self.missed, default=math.inf)
        return max((rate for rate in self.kept if rate < ceiling), default=None)

    def next_rate(self) -> float | None:
        """Return the next step's rate in requests per second, or None at the end of the search."""
        if len(self.kept) + len(self.missed) >= MAX_STEPS:
            return None
        low, high = self.knee, min(self.missed, default=None)
        if high is None:
            return self.first if low is None else low * 2
        if low is None:
            return high / 2 if high / 2 >= self.first * MIN_RATIO else None
        return math.sqrt(low * high) if high / low > self.precision else None

    def record(self, rate: float, has_kept: bool) -> None:
        """Record whether a step at `rate` kept the goals."""
        (self.kept if has_kept else self.missed).append(rate)
