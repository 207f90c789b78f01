"""How fast prompts arrive: lately, on the whole, and in the largest burst. Pure."""

from collections import deque
from typing import NamedTuple

BURST_SECONDS = 5.0
"""Of no shorter time is it said how much arrives a second: one long prompt is no burst."""


class Rates(NamedTuple):
    """Tokens a second."""

    recent: float  # over the window
    average: float  # over all that is remembered
    burst: float  # in that stretch of what is remembered in which most came


class ArrivalRate:
    """Counts tokens that arrive.

    Args:
        window: seconds that count as lately; no burst is longer.
    """

    def __init__(self, window: float) -> None:
        self._window = window
        self._last_total = 0  # what was counted last
        self._sums: deque[tuple[float, int]] = deque()  # when, and all that came until then
        self._bursts: deque[tuple[float, float]] = deque()  # when, and how large; falling

    def count(self, now: float, total: int) -> int:
        """So many have arrived until `now`; fewer than before: the counting began anew.

        Returns how many came since the last time.
        """
        came = max(total - self._last_total, 0) if self._sums else 0
        self._sums.append((now, came + (self._sums[-1][1] if self._sums else 0)))
        self._last_total = total
        burst = self._burst()
        # A smaller one is never asked for once there is a later, larger one.
        while self._bursts and self._bursts[-1][1] <= burst:
            self._bursts.pop()
        self._bursts.append((now, burst))
        return came

    def rates(self, memory: float) -> Rates:
        """What is remembered of the last `memory` seconds; what came before is forgotten."""
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
        """Of all stretches that end now the most that came in one, a second."""
        now, total = self._sums[-1]
        return max(
            (total - before) / max(now - then, BURST_SECONDS)
            for then, before in self._window_samples()
        )

    def _window_samples(self) -> list[tuple[float, int]]:
        """The times within the window, from now back to the first that is as old as it."""
        found = []
        for each in reversed(self._sums):
            found.append(each)
            if len(found) > 1 and each[0] <= self._sums[-1][0] - self._window:
                break
        return found
