"""Measures cold starts: how long a new worker takes until it serves.

This module does no I/O and reads no clock. The caller passes the times.
"""

from collections import deque
from collections.abc import Mapping
from statistics import median

from penstock.cluster.autoscaling.pool_changes import Phase

NUM_REMEMBERED = 5
"""The cold start time of a pool is the median of this many recent cold starts."""


class ColdStartTimes:
    """Measures, for each pool, the seconds from requesting a worker until the worker serves."""

    def __init__(self) -> None:
        # For each worker that does not serve yet, the time at which it was requested.
        self._pending_since: dict[str, float] = {}
        # Last cold start times of each pool, in seconds.
        self._durations: dict[str, deque[float]] = {}

    def observe(self, phases: Mapping[str, Mapping[str, Phase]], now: float) -> None:
        """Record the phase of every worker at time `now`.

        Args:
            phases: phase of each worker, by pool name and worker name.
        """
        for pool, of in phases.items():
            for name, phase in of.items():
                if phase is Phase.PENDING:
                    self._pending_since.setdefault(name, now)
                    continue
                pending_since = self._pending_since.pop(name, None)
                if pending_since is not None and phase is Phase.SERVING:
                    self._durations.setdefault(pool, deque(maxlen=NUM_REMEMBERED)).append(
                        now - pending_since
                    )

    def median_seconds(self, pool: str) -> float:
        """Return the pool's median cold start time [s], or 0 if no cold start is known."""
        return median(self._durations.get(pool, (0.0,)))
