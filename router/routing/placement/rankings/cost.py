"""Ranking by cost: the work of a prompt at each worker, in tokens of prompt computation.

    cost = queued tokens + PROMPT_WEIGHT x uncached tokens of the prompt + decode load

A larger `PROMPT_WEIGHT` raises the share of cached tokens, and a smaller one balances queues
better. Among workers of equal cost, the one with the fewest sequences is chosen. Among those, the
one with the fewest assigned tokens is chosen, because it has the least to evict from its cache.
"""

from collections.abc import Sequence

from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.fleet import KV_READ_COST, MAX_READS
from penstock.router.routing.placement.ranking import least, with_capacity
from penstock.router.routing.placement.rankings.least_loaded import (
    PENALTY_TOKENS,
    LeastLoadedRanking,
)
from penstock.router.routing.worker_view import WorkerView

PROMPT_WEIGHT = 2.5
SIMILAR_UTILIZATION = 0.05
"""A decode worker is preferred for its cache if its utilization is at most this much higher.

Its utilization is compared with that of the least utilized worker. A cached prefix saves a part of
the KV transfer.
"""

_by_load = LeastLoadedRanking()


class CostRanking:
    """Prefers the worker with the lowest cost."""

    def prompt_worker(
        self, views: Sequence[WorkerView], demand: Demand, now: float, needs_capacity: bool = True
    ) -> WorkerView | None:
        cached, num_tokens = demand.cached_tokens or {}, demand.num_tokens
        read_cost = read_cost_of(demand)

        def key(view: WorkerView) -> tuple[float, int, int, str]:
            queued, reads, busy, assigned, name = view.by_cost
            saved = min(cached.get(name, 0), num_tokens - 1) if cached else 0
            cost = queued + read_cost * reads - PROMPT_WEIGHT * saved
            return cost + PENALTY_TOKENS * view.penalty(now), busy, assigned, name

        return least(views, key, demand if needs_capacity else None)

    def answer_worker(
        self, views: Sequence[WorkerView], demand: Demand, now: float
    ) -> WorkerView | None:
        if demand.is_pinned and not demand.has_source:
            return self.prompt_worker(views, demand, now)
        best = _by_load.answer_worker(views, demand, now)
        cached = demand.cached_tokens
        if best is None or not cached:
            return best
        limit = best.by_utilization[0] + SIMILAR_UTILIZATION
        similar = [
            view
            for view in views
            if view.name in cached
            and view.by_utilization[0] + view.penalty(now) <= limit
            and cached[view.name] > cached.get(best.name, 0)
        ]
        able = with_capacity(similar, demand)
        return max(able, key=lambda view: (cached[view.name], view.name), default=best)


def read_cost_of(demand: Demand) -> float:
    """Return the cost, in prompt tokens, of reading one KV token in all steps of an answer."""
    return KV_READ_COST * max(min(demand.num_remaining - 1, MAX_READS), 0)
