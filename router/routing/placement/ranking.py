"""Interface of rankings, which order the workers of one role, and helpers that rankings share."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.worker_view import PENALTY_SECONDS, WorkerView


class Ranking(Protocol):
    """Chooses the best of several workers of one role; `RolePolicy` chooses the role.

    The methods return None if no worker has room for the request. All `views` must be usable
    workers.
    """

    def prompt_worker(
        self, views: Sequence[WorkerView], demand: Demand, now: float, needs_capacity: bool = True
    ) -> WorkerView | None:
        """Return the best worker for computing the prompt.

        Args:
            views: the candidates.
            demand: the request.
            now: the time, in seconds of the router's monotonic clock.
            needs_capacity: if False, full workers are candidates too.
        """
        ...

    def answer_worker(
        self, views: Sequence[WorkerView], demand: Demand, now: float
    ) -> WorkerView | None:
        """Return the best worker for generating the answer.

        The prompt is computed elsewhere, unless `demand.is_pinned`.
        """
        ...


def with_prefill_slot(views: Sequence[WorkerView]) -> Sequence[WorkerView]:
    """Return the workers that can start a prompt now.

    If prompts queue at the workers instead of the router, all workers are returned.
    """
    if not views or not views[0].queues_at_router:
        return views
    return [view for view in views if view.has_prefill_slot]


def with_capacity(views: Sequence[WorkerView], demand: Demand) -> list[WorkerView]:
    """Return the workers that have room for a request."""
    return [view for view in views if view.has_capacity(demand.num_tokens, demand.num_sequences)]


def none_penalized(views: Sequence[WorkerView], now: float) -> bool:
    """Return whether no worker has a placement penalty for a recent loss."""
    since = now - PENALTY_SECONDS
    return not any([view.lost_at > since for view in views])


def least(
    views: Sequence[WorkerView], key: Callable[[WorkerView], Any], demand: Demand | None
) -> WorkerView | None:
    """Return the worker with the smallest key, or None.

    If `demand` is given, only workers with room for it count. For speed, the worker with the
    smallest key of all is checked first.
    """
    best = min(views, key=key, default=None)
    if best is None or demand is None or best.has_capacity(demand.num_tokens, demand.num_sequences):
        return best
    return min(with_capacity(views, demand), key=key, default=None)
