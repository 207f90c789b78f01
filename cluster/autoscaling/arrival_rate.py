"""Arrival rates of prompt tokens: recent, average, and in the largest burst.

Pure code: no I/O and no clock.
"""

from collections import deque
from typing import NamedTuple

BURST_SECONDS = 5.0
"""Shortest time over which a burst is averaged, so that one long prompt is not a burst."""


class Rates(NamedTuple):
    """Arrival rates in tokens per second."""

    recent: float  # rate over the last `window` seconds
    average: float  # rate over all samples that are still stored
    burst: float  # largest rate over any interval of at most `window` seconds


class ArrivalRate:
    """Measures arrival rates from samples of a running total of tokens.

    Args:
        window: length of the recent interval, and maximum length of a burst, in seconds.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._last_total = 0  # total at the last sample
        self._sums: deque[tuple[float, int]] = deque()  # (time, tokens that arrived by this time)
        self._bursts: deque[tuple[float, float]] = deque()  # (time, rate), highest rate first

    def count(self, now: float, total: int) -> int:
        """Add a sample: the running total of tokens at time `now`.

        If `total` is below the last total, counting has restarted and no arrivals are added.

        Returns:
            Number of tokens that arrived since the last sample; 0 for the first sample.
        """
        came = max(total - self._last_total, 0) if self._sums else 0
        self._sums.append((now, came + (self._sums[-1][1] if self._sums else 0)))
        self._last_total = total
        burst = self._burst()
        # Monotonic queue: an earlier burst that is not larger can no longer become the maximum.
        while self._bursts and self._bursts[-1][1] <= burst:
            self._bursts.pop()
        self._bursts.append((now, burst))
        return came

    def rates(self, memory: float) -> Rates:
        """Return the rates; average and burst cover `memory` seconds. Drop older samples."""
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
        """Return the window's samples, newest first, and the last sample before the window."""
        found = []
        for each in reversed(self._sums):
            found.append(each)
            if len(found) > 1 and each[0] <= self._sums[-1][0] - self._window:
                break
        return found
