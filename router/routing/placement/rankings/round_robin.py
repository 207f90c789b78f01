"""Ranking that takes the workers in turn, by the number of the request."""

from collections.abc import Sequence

from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.worker_view import WorkerView


class RoundRobinRanking:
    """Gives consecutive requests to consecutive workers. Workers without room are skipped."""

    def prompt_worker(
        self, views: Sequence[WorkerView], demand: Demand, now: float, needs_capacity: bool = True
    ) -> WorkerView | None:
        ordered = sorted(views, key=lambda view: view.name)
        start = demand.request % max(len(ordered), 1)
        return next(
            (
                view
                for view in (*ordered[start:], *ordered[:start])
                if not needs_capacity or view.has_capacity(demand.num_tokens, demand.num_sequences)
            ),
            None,
        )

    def answer_worker(
        self, views: Sequence[WorkerView], demand: Demand, now: float
    ) -> WorkerView | None:
        return self.prompt_worker(views, demand, now)
