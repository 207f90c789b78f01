"""Estimates how much of the observed work a pool of each size would have computed too late.

Pure code: times are arguments. The backlog of every pool size is simulated in parallel. Work that
would wait for longer than `max_wait` is late and is removed from the backlog, because it delays no
other work: with a TTFT SLO, routers queue late work behind all work that can still be in time. Late
work counts only if the backlog was empty less than a cold start ago: if the load lasts longer, the
autoscaler starts more workers anyway.
"""

from math import exp

MEMORY_SECONDS = 3600.0
"""Time constant of the exponential decay of past work."""


class LateWorkModel:
    """Simulates pools of 1 to `max_size` workers; work is measured in worker-seconds.

    Args:
        max_size: the largest pool size to simulate.
        max_wait: seconds that work may wait; longer waits are late.
    """

    def __init__(self, max_size: int, max_wait: float) -> None:
        self._max_wait = max_wait
        self._started_at: float | None = None
        self._now = 0.0
        self._total = 0.0  # all work, exponentially decayed
        self._backlogs = [0.0] * max_size  # backlog of pool size `index + 1`
        self._idle_at = [0.0] * max_size  # when each backlog was last empty
        self._late = [0.0] * max_size  # late work of each pool size, exponentially decayed

    def observe(self, now: float, work: float, cold_start: float) -> None:
        """Advance to `now`; `work` arrived since the last call. `cold_start` is in seconds."""
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

        The total work is extrapolated to a history much longer than `MEMORY_SECONDS`. The work that
        the extrapolation adds counts as in time.
        """
        passed = self._now - self._started_at if self._started_at is not None else 0.0
        if not passed:
            return 1
        usual = self._total / -(exp(-passed / MEMORY_SECONDS) - 1)
        # Search downwards: a small size whose backlog is never empty records no late work.
        sizes = range(len(self._late), 0, -1)
        largest = next(
            (size for size in sizes if self._late[size - 1] > max_late_fraction * usual), 0
        )
        return min(largest + 1, len(self._late))
