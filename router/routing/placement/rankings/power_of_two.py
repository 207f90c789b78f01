"""Ranking by power of two choices: the less loaded of two workers drawn at random."""

from collections.abc import Sequence

from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.ranking import with_capacity
from penstock.router.routing.placement.rankings.hashing import mix
from penstock.router.routing.placement.rankings.least_loaded import LeastLoadedRanking
from penstock.router.routing.worker_view import WorkerView

_by_load = LeastLoadedRanking()


class PowerOfTwoRanking:
    """Compares only two workers. The number of the request determines which two."""

    def prompt_worker(
        self, views: Sequence[WorkerView], demand: Demand, now: float, needs_capacity: bool = True
    ) -> WorkerView | None:
        able = with_capacity(views, demand) if needs_capacity else views
        return _by_load.prompt_worker(_draw(able, 2 * demand.request), demand, now, needs_capacity)

    def answer_worker(
        self, views: Sequence[WorkerView], demand: Demand, now: float
    ) -> WorkerView | None:
        able = with_capacity(views, demand)
        return _by_load.answer_worker(_draw(able, 2 * demand.request + 1), demand, now)


def _draw(views: Sequence[WorkerView], seed: int) -> Sequence[WorkerView]:
    """Return two different workers, or all workers if there are at most two."""
    if len(views) <= 2:
        return views
    ordered = sorted(views, key=lambda view: view.name)
    number = mix(seed)
    first = number % len(views)
    other = (first + 1 + (number >> 32) % (len(views) - 1)) % len(views)
    return ordered[first], ordered[other]
