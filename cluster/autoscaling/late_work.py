"""Work that a pool of each size would have computed too late, for the observed arrivals. Pure.

Simulates the backlog of every pool size in parallel: work arrives, `size` workers compute it, and
work that would wait for longer than `max_wait` is late. Late work is removed from the backlog:
with a TTFT SLO it is deferred behind work that can still be in time, so it delays nothing else.
Late work counts only if the backlog was empty less than a cold start ago: under a longer load the
pool grows anyway.
"""

from math import exp

MEMORY_SECONDS = 3600.0
"""Time constant of the exponential decay of past work."""


class LateWorkModel:
    """Simulates pools of 1 to `max_size` workers. Work is in seconds of one worker.

    Args:
        max_size: the largest pool size to simulate.
        max_wait: seconds for which work may wait before it is late.
    """

    def __init__(self, max_size: int, max_wait: float) -> None:
        self._max_wait = max_wait
        self._started_at: float | None = None
        self._now = 0.0
        self._total = 0.0  # all work, decayed
        self._backlogs = [0.0] * max_size  # index: size - 1, as in the next two
        self._idle_at = [0.0] * max_size  # time of the last empty backlog
        self._late = [0.0] * max_size  # late work, decayed

    def observe(self, now: float, work: float, cold_start: float) -> None:
        """Add `work` that arrived since the last call; a cold start takes `cold_start` seconds."""
        if self._started_at is None:
            self._started_at = self._now = now
            self._idle_at = [now] * len(self._backlogs)
        passed, self._now = now - self._now, now
        kept = exp(-passed / MEMORY_SECONDS)
        self._total = kept * self._total + work
        for index, waits in enumerate(self._backlogs):
            size = index + 1
            waits = max(waits + work - size * passed, 0.0)
            late = max(waits - size * self._max_wait, 0.0)
            self._backlogs[index] = waits - late
            if waits == 0:
                self._idle_at[index] = now
            is_recent = now - self._idle_at[index] <= cold_start + passed
            self._late[index] = kept * self._late[index] + late * is_recent

    def smallest_size(self, max_late_fraction: float) -> int:
        """Return the smallest size for which at most `max_late_fraction` of all work is late.

        During the first `MEMORY_SECONDS`, the total work is extrapolated to that time, and the
        extrapolated part counts as in time.
        """
        passed = self._now - self._started_at if self._started_at is not None else 0.0
        if not passed:
            return 1
        usual = self._total / -(exp(-passed / MEMORY_SECONDS) - 1)
        # Search from the largest size: sizes whose backlog is never empty record no late work.
        sizes = range(len(self._late), 0, -1)
        largest = next(
            (size for size in sizes if self._late[size - 1] > max_late_fraction * usual), 0
        )
        return min(largest + 1, len(self._late))
