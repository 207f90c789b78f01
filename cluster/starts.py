"""How long new workers take to serve, from the phases that they are seen in. Pure."""

from collections import deque
from collections.abc import Mapping
from statistics import median

from penstock.cluster.slots import Phase

LAST = 5
"""Starts of a pool that count."""


class Starts:
    """Seconds from when workers were asked for until they served, in each pool."""

    def __init__(self) -> None:
        self._asked: dict[str, float] = {}  # who is pending, since when
        self._took: dict[str, deque[float]] = {}

    def see(self, phases: Mapping[str, Mapping[str, Phase]], now: float) -> None:
        """What the workers of each pool do at `now`."""
        for pool, of in phases.items():
            for name, phase in of.items():
                if phase is Phase.PENDING:
                    self._asked.setdefault(name, now)
                    continue
                asked = self._asked.pop(name, None)
                if asked is not None and phase is Phase.SERVING:
                    self._took.setdefault(pool, deque(maxlen=LAST)).append(now - asked)

    def usual(self, pool: str) -> float:
        """The median of the last ones; 0: none is known."""
        return median(self._took.get(pool, (0.0,)))
