"""What pools of any size would have been too late for, had they met the same prompts. Pure.

For every size at once the work that waits is played along: it comes, so many workers do it, and
what would wait for longer than it may is late. Where first tokens are promised such work stands
back for what can still be in time, so what was too much for a pool once makes nobody late later.
Only what comes before more workers could be there counts: to a load that lasts a pool grows.
"""

from math import exp

MEMORY_SECONDS = 3600.0
"""What happened longer ago counts less and less."""


class LateWorkModel:
    """Work is in seconds of one worker.

    Args:
        most: the largest size that is asked for.
        wait: seconds for which work may wait.
    """

    def __init__(self, max_size: int, max_wait: float) -> None:
        self._max_wait = max_wait
        self._started_at: float | None = None
        self._now = 0.0
        self._total = 0.0  # all work, what is long ago counting less
        self._backlogs = [0.0] * max_size  # by size, from 1 on
        self._idle_at = [0.0] * max_size  # when nothing waited last
        self._late = [0.0] * max_size  # counted like `_total`

    def observe(self, now: float, work: float, cold_start: float) -> None:
        """So much has come since the last time, as good as evenly; a new worker takes so long."""
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
        """The smallest size that would have been late for at most that share of the work of such a
        time as is remembered; before so much has passed nothing of the rest is thought late."""
        passed = self._now - self._started_at if self._started_at is not None else 0.0
        if not passed:
            return 1
        usual = self._total / -(exp(-passed / MEMORY_SECONDS) - 1)
        # A pool that is always too small counts as growing: the largest that is late says it.
        sizes = range(len(self._late), 0, -1)
        largest = next(
            (size for size in sizes if self._late[size - 1] > max_late_fraction * usual), 0
        )
        return min(largest + 1, len(self._late))
