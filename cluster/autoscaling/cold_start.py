"""Measured cold starts: how long new workers take until they serve. Pure."""

from collections import deque
from collections.abc import Mapping
from statistics import median

from penstock.cluster.autoscaling.pool_changes import Phase

NUM_REMEMBERED = 5
"""Number of a pool's last cold starts that count."""


class ColdStartTimes:
    """Seconds from the request for a worker until it serves, for each pool."""

    def __init__(self) -> None:
        self._pending_since: dict[str, float] = {}  # worker to time
        self._durations: dict[str, deque[float]] = {}  # by pool

    def observe(self, phases: Mapping[str, Mapping[str, Phase]], now: float) -> None:
        """Record the phase of each worker, by pool and name, at `now`."""
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
        """Return the median of the pool's last cold starts; 0 if none is known."""
        return median(self._durations.get(pool, (0.0,)))
