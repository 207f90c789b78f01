"""Estimates, for each pool size, how much of the past work would have been computed too late.

The model simulates the backlog of every pool size. Work is late if it would wait for longer than
`max_wait`. Late work is removed from the backlog, because routers with a TTFT SLO queue late
prompts behind all others.

If a high load lasts longer than a cold start, the autoscaler starts workers anyway. Late work
therefore counts only if it occurs within one cold start time after the backlog was last empty.

This module reads no clock. The caller passes the times.
"""

from math import exp

MEMORY_SECONDS = 3600.0
"""Time constant of the exponential decay by which older work gets less weight."""


class LateWorkModel:
    """Simulates pools of 1 to `max_size` workers. Work is measured in worker-seconds.

    Args:
        max_size: the largest pool size to simulate.
        max_wait: seconds that work may wait before it is late.
    """

    def __init__(self, max_size: int, max_wait: float) -> None:
        self._max_wait = max_wait
        self._started_at: float | None = None
        self._now = 0.0
        self._total = 0.0  # sum of all past work, exponentially decayed
        # Entry `index` is the backlog of a pool of `index + 1` workers.
        self._backlogs = [0.0] * max_size
        # For each pool size, the time when its backlog was last empty.
        self._idle_at = [0.0] * max_size
        # For each pool size, the sum of its late work, exponentially decayed.
        self._late = [0.0] * max_size

    def observe(self, now: float, work: float, cold_start: float) -> None:
        """Advance the simulation of all pool sizes to time `now`.

        Args:
            work: work that arrived since the last call, in worker-seconds.
            cold_start: seconds until a new worker would serve.
        """
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
        """Return the smallest pool size for which at most `max_late_fraction` of all work is late.

        The observed work of a short history is extrapolated to a history much longer than
        `MEMORY_SECONDS`. The work that the extrapolation adds counts as computed in time.
        """
        passed = self._now - self._started_at if self._started_at is not None else 0.0
        if not passed:
            return 1
        usual = self._total / -(exp(-passed / MEMORY_SECONDS) - 1)
        # A pool that is far too small is never idle, so no late work is recorded for it. The search
        # therefore starts at the largest size.
        sizes = range(len(self._late), 0, -1)
        largest = next(
            (size for size in sizes if self._late[size - 1] > max_late_fraction * usual), 0
        )
        return min(largest + 1, len(self._late))
