"""Measures cold starts: how long new workers take until they serve.

Pure code: no I/O and no clock.
"""

from collections import deque
from collections.abc import Mapping
from statistics import median

from penstock.cluster.autoscaling.pool_changes import Phase

NUM_REMEMBERED = 5
"""Number of last cold starts of a pool from which the median is taken."""


class ColdStartTimes:
    """Measures, for each pool, the seconds from requesting a worker until the worker serves."""

    def __init__(self) -> None:
        self._pending_since: dict[
            str, float
        ] = {}  # worker name to the time at which the worker was requested
        self._durations: dict[str, deque[float]] = {}  # pool to its last cold starts [s]

    def observe(self, phases: Mapping[str, Mapping[str, Phase]], now: float) -> None:
        """Record the workers' phases (pool to worker name to phase) at time `now`."""
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
        """Return the median of the pool's last cold starts [s]; 0 if no cold start is known."""
        return median(self._durations.get(pool, (0.0,)))
