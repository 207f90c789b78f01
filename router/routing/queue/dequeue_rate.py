"""Measured speed at which a queue empties."""

import math


class DequeueRate:
    """Measures how much cost leaves the queue per second, while requests wait.

    The cost of a request is `QueuedRequest.cost`. The average covers about the last `WINDOW`
    seconds. Time without a waiting request does not count. Requests that did not wait do not count
    either, since the queue could have emptied faster.
    """

    WINDOW = 10.0  # seconds
    ASSUMED = 1000.0
    """Cost per second before the first measurement."""
    NEEDED = 1.0
    """Seconds of measurement from which on the measured rate is used."""

    def __init__(self) -> None:
        # Sums of cost and seconds with exponential decay, up to the time when the last request
        # left.
        self._cost = self._seconds = 0.0
        self._measured = 0.0  # all measured seconds, without decay
        # Time up to which waiting has been counted; None while no request waits.
        self._counted_until: float | None = None

    def began_to_wait(self, now: float) -> None:
        """Record that a request waits."""
        if self._counted_until is None:
            self._counted_until = now

    def emptied(self) -> None:
        """Record that no request waits."""
        self._counted_until = None

    def add(self, cost: int, arrived_at: float, now: float) -> None:
        """Record that a request which arrived at `arrived_at` leaves the queue."""
        waited = self._uncounted(now)
        self._cost, self._seconds = self._sums(waited)
        self._measured += waited
        self._counted_until = now
        if waited or arrived_at < now:
            self._cost += cost

    @property
    def last_measured(self) -> float | None:
        """Cost per second until the last request left, or None without enough measurements."""
        return self._cost / self._seconds if self._measured >= self.NEEDED else None

    def value(self, now: float) -> float:
        """Return the cost per second, at least 1; it falls while no request leaves the queue."""
        waited = self._uncounted(now)
        if self._measured + waited < self.NEEDED:
            return self.ASSUMED
        cost, seconds = self._sums(waited)
        return max(cost / seconds, 1.0)

    def _uncounted(self, now: float) -> float:
        """Return the seconds of waiting that are not counted yet, or 0 while no request waits."""
        return 0.0 if self._counted_until is None else now - self._counted_until

    def _sums(self, waited: float) -> tuple[float, float]:
        """Return the sums after `waited` more seconds of waiting."""
        weight = math.exp(-waited / self.WINDOW)
        return self._cost * weight, self._seconds * weight + self.WINDOW * (1 - weight)
