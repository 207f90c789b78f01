"""Measures how fast prompt tokens arrive: recently, on average, and in the largest burst.

This module does no I/O and reads no clock. The caller passes the times.
"""

from collections import deque
from typing import NamedTuple

BURST_SECONDS = 5.0
"""Shortest interval over which the rate of a burst is averaged.

Over a shorter interval, a single long prompt would look like a burst.
"""


class Rates(NamedTuple):
    """Arrival rates of prompt tokens, in tokens per second."""

    recent: float  # average arrival rate over the last `window` seconds
    average: float  # average arrival rate over the `memory` seconds that `rates` was given
    burst: float  # largest arrival rate over any interval of at most `window` seconds


class ArrivalRate:
    """Measures arrival rates from samples of the total number of tokens that have arrived.

    Args:
        window: length in seconds of the interval for the recent rate. A burst is at most this long.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._last_total = 0  # the value of `total` in the last call of `count`
        # Pairs of a time and the number of tokens that had arrived by then.
        self._sums: deque[tuple[float, int]] = deque()
        # Pairs of a time and the burst rate at that time, highest rate first.
        self._bursts: deque[tuple[float, float]] = deque()

    def count(self, now: float, total: int) -> int:
        """Add a sample: `total` tokens have arrived by time `now`.

        A total below the last one means that counting has restarted. Such a sample adds no
        arrivals.

        Returns:
            Number of tokens that arrived since the last sample, or 0 for the first sample.
        """
        came = max(total - self._last_total, 0) if self._sums else 0
        self._sums.append((now, came + (self._sums[-1][1] if self._sums else 0)))
        self._last_total = total
        burst = self._burst()
        # An earlier burst that is not larger than this one can no longer become the maximum.
        while self._bursts and self._bursts[-1][1] <= burst:
            self._bursts.pop()
        self._bursts.append((now, burst))
        return came

    def rates(self, memory: float) -> Rates:
        """Return the arrival rates, and drop the samples that are too old to change a rate.

        The average and the largest burst are those of the last `memory` seconds.
        """
        now = self._sums[-1][0]
        while len(self._sums) > 2 and self._sums[1][0] <= now - max(memory, self._window):
            self._sums.popleft()
        while self._bursts[0][0] < now - memory:
            self._bursts.popleft()
        return Rates(
            self._rate(self._window_samples()[-1]), self._rate(self._sums[0]), self._bursts[0][1]
        )

    def _rate(self, since: tuple[float, int]) -> float:
        (then, before), (now, total) = since, self._sums[-1]
        return (total - before) / (now - then) if now > then else 0.0

    def _burst(self) -> float:
        """Return the largest rate over any interval that ends now and is at most `window` long."""
        now, total = self._sums[-1]
        return max(
            (total - before) / max(now - then, BURST_SECONDS)
            for then, before in self._window_samples()
        )

    def _window_samples(self) -> list[tuple[float, int]]:
        """Return the samples of the last `window` seconds, and the last sample before that time.

        The newest sample is the first of the result.
        """
        found = []
        for each in reversed(self._sums):
            found.append(each)
            if len(found) > 1 and each[0] <= self._sums[-1][0] - self._window:
                break
        return found
