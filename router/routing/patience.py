"""How long requests may wait: their deadlines, and what waits for workers that do not come."""

import heapq
from collections.abc import Iterable, Iterator, Mapping

from penstock.router.routing.events import Status
from penstock.router.routing.fleet import Fleet
from penstock.router.routing.lifecycle import Life


class Patience:
    """Every wait is bounded; here by time."""

    def __init__(self, wait_without_workers: float) -> None:
        self._wait_without_workers = wait_without_workers
        self._deadlines: list[tuple[float, int]] = []  # a heap; ended requests stay until theirs
        self._deserted_since: float | None = 0.0  # since when no worker is there to stay

    def add(self, life: Life) -> None:
        if life.request.deadline != float("inf"):
            heapq.heappush(self._deadlines, (life.request.deadline, life.request.id))

    def watch(self, fleet: Fleet, now: float) -> None:
        """Call after workers came, went, began to drain, or got on again."""
        if any(view.stays for view in fleet.views()):
            self._deserted_since = None
        elif self._deserted_since is None:
            self._deserted_since = now

    def over(self, lives: Mapping[int, Life], now: float) -> Iterator[tuple[Life, Status, str]]:
        """The requests that have waited too long, and how each is to end."""
        while self._deadlines and self._deadlines[0][0] <= now:
            life = lives.get(heapq.heappop(self._deadlines)[1])
            if life is None:
                continue
            if self._deserted_since is not None and life.homeless:
                yield life, Status.UNAVAILABLE, "no worker is there"
            else:
                yield life, Status.DEADLINE, "the deadline passed"
        yield from self._stranded(list(lives.values()), now)

    def _stranded(self, lives: Iterable[Life], now: float) -> Iterator[tuple[Life, Status, str]]:
        bound = now - self._wait_without_workers
        if self._deserted_since is None or self._deserted_since > bound:
            return
        for life in lives:
            if life.homeless and life.since <= bound:
                yield life, Status.UNAVAILABLE, "no worker is there"
