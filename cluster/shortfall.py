"""What pools of any size would have been too late for, had they met the same prompts. Pure.

For every size at once the work that waits is played along: it comes, so many workers do it, and
what would wait for longer than it may is late. Where first tokens are promised such work stands
back for what can still be in time, so what was too much for a pool once makes nobody late later.
Only what comes before more workers could be there counts: to a load that lasts a pool grows.
"""

from math import exp

MEMORY_SECONDS = 3600.0
"""What happened longer ago counts less and less."""


class Shortfall:
    """Work is in seconds of one worker.

    Args:
        most: the largest size that is asked for.
        wait: seconds for which work may wait.
    """

    def __init__(self, most: int, wait: float) -> None:
        self._wait = wait
        self._begun: float | None = None
        self._now = 0.0
        self._came = 0.0  # all work, what is long ago counting less
        self._waits = [0.0] * most  # by size, from 1 on
        self._rested = [0.0] * most  # when nothing waited last
        self._late = [0.0] * most  # counted like `_came`

    def come(self, now: float, work: float, cold_start: float) -> None:
        """So much has come since the last time, as good as evenly; a new worker takes so long."""
        if self._begun is None:
            self._begun = self._now = now
            self._rested = [now] * len(self._waits)
        passed, self._now = now - self._now, now
        kept = exp(-passed / MEMORY_SECONDS)
        self._came = kept * self._came + work
        for place, waits in enumerate(self._waits):
            size = place + 1
            waits = max(waits + work - size * passed, 0.0)
            late = max(waits - size * self._wait, 0.0)
            self._waits[place] = waits - late
            if waits == 0:
                self._rested[place] = now
            alone = now - self._rested[place] <= cold_start + passed
            self._late[place] = kept * self._late[place] + late * alone

    def least(self, share: float) -> int:
        """The smallest size that would have been late for at most that share of the work of such a
        time as is remembered; before so much has passed nothing of the rest is thought late."""
        passed = self._now - self._begun if self._begun is not None else 0.0
        if not passed:
            return 1
        usual = self._came / -(exp(-passed / MEMORY_SECONDS) - 1)
        # A pool that is always too small counts as growing: the largest that is late says it.
        sizes = range(len(self._late), 0, -1)
        largest = next((size for size in sizes if self._late[size - 1] > share * usual), 0)
        return min(largest + 1, len(self._late))
