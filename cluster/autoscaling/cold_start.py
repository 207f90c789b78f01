"""How long new workers take to serve, from the phases that they are seen in. Pure."""

from collections import deque
from collections.abc import Mapping
from statistics import median

from penstock.cluster.autoscaling.pool_changes import Phase

NUM_REMEMBERED = 5
"""Starts of a pool that count."""


class ColdStartTimes:
    """Seconds from when workers were asked for until they served, in each pool."""

    def __init__(self) -> None:
        self._pending_since: dict[str, float] = {}  # who is pending, since when
        self._durations: dict[str, deque[float]] = {}

    def observe(self, phases: Mapping[str, Mapping[str, Phase]], now: float) -> None:
        """What the workers of each pool do at `now`."""
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
        """The median of the last ones; 0: none is known."""
        return median(self._durations.get(pool, (0.0,)))
