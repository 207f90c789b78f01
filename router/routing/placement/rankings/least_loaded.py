"""Ranking by load: the shortest queue of prompt tokens, or the least utilized worker."""

from collections.abc import Sequence
from operator import attrgetter

from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.ranking import least, none_penalized
from penstock.router.routing.worker_view import WorkerView

PENALTY_TOKENS = 2048
"""Placement penalty of a prefill worker just after a loss, in queued tokens."""


class LeastLoadedRanking:
    """Prefers short queues for prompts, and workers with much free capacity for answers.

    Load is the share of a worker's capacity that is in use.
    """

    def prompt_worker(
        self, views: Sequence[WorkerView], demand: Demand, now: float, needs_capacity: bool = True
    ) -> WorkerView | None:
        def key(view: WorkerView) -> tuple[float, int, int, str]:
            tokens, busy, num_assigned, name = view.by_queue
            return tokens + PENALTY_TOKENS * view.penalty(now), busy, num_assigned, name

        return least(
            views,
            attrgetter("by_queue") if none_penalized(views, now) else key,
            demand if needs_capacity else None,
        )

    def answer_worker(
        self, views: Sequence[WorkerView], demand: Demand, now: float
    ) -> WorkerView | None:
        def key(view: WorkerView) -> tuple[float, float, int, str]:
            busy, filled, num_assigned, name = view.by_utilization
            return busy + view.penalty(now), filled, num_assigned, name

        return least(
            views, attrgetter("by_utilization") if none_penalized(views, now) else key, demand
        )
