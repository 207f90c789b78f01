"""Interface to the workers among which a request is placed, and its plain implementation.

`RolePolicy` chooses roles and asks for the best worker of a role. `ListCandidates` compares all
workers with a ranking. `ArrayCandidates` finds the same workers for `CostRanking` in less time.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeAlias

from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.disaggregation import (
    DisaggregationPolicy,
    ignores_roles,
    single_worker,
)
from penstock.router.routing.placement.ranking import Ranking, with_capacity, with_prefill_slot
from penstock.router.routing.worker_view import WorkerView

Group: TypeAlias = Literal["all", "prompt", "answer", "prefill", "kept"]
"""Group of workers, by the work that they may get.

- "all": all workers.
- "prompt": workers for prompts, with the role prefill or mixed.
- "answer": workers for answers, with the role decode or mixed.
- "prefill": workers with the role prefill.
- "kept": workers whose role prefill was not assigned by an operator. They may also generate the
  answers to their prompts.
"""


class Candidates(Protocol):
    """Interface to the usable workers of a router that are fit for one request."""

    def has(self, group: Group) -> bool:
        """Return whether a group has workers, with or without room."""
        ...

    def count(self, group: Group) -> int:
        """Return the number of workers of a group, with or without room."""
        ...

    def view(self, name: str) -> WorkerView:
        """Return a worker by its name."""
        ...

    def prompt_worker(self, group: Group, needs_capacity: bool = True) -> WorkerView | None:
        """Return the best worker of a group for the prompt.

        Args:
            group: the group.
            needs_capacity: if False, workers without room are candidates too.
        """
        ...

    def answer_worker(self, group: Group, layout: str | None = None) -> WorkerView | None:
        """Return the best worker of a group for the answer.

        A `layout` restricts the choice to workers with this layout of KV blocks.
        """
        ...

    def single_worker(self) -> WorkerView | None:
        """Return the worker that should generate all answers, or None.

        There is such a worker if all workers share one machine, and one of them is faster alone.
        """
        ...

    def sharing_worker(self) -> WorkerView | None:
        """Return the best worker of any role for prompt and answer if roles do not matter.

        The result is None if roles matter (see `ignores_roles`), or if no worker has room.
        """
        ...

    def colocated_worker(self, costs: DisaggregationPolicy) -> WorkerView | None:
        """Return the "answer" worker that computes the prompt at the lowest cost, or None."""
        ...

    def kept_worker(self) -> WorkerView | None:
        """Return the least busy of the prefill workers that may generate an answer, or None."""
        ...


class ListCandidates:
    """Compares all workers, with any ranking.

    Args:
        ranking: orders the workers of a group.
        demand: the request.
        workers: all workers.
        now: the time, in seconds of the router's monotonic clock.
    """

    def __init__(
        self, ranking: Ranking, demand: Demand, workers: Sequence[WorkerView], now: float
    ) -> None:
        unfit = demand.unfit_workers
        live = [view for view in workers if view.is_usable and not (unfit and view.name in unfit)]
        self._ranking, self._demand, self._now = ranking, demand, now
        self._groups: dict[Group, list[WorkerView]] = {
            "all": live,
            "prompt": [view for view in live if view.role != "decode"],
            "answer": [view for view in live if view.role != "prefill"],
            "prefill": [view for view in live if view.role == "prefill"],
            "kept": [view for view in live if view.role == "prefill" and not view.is_shedding],
        }

    def has(self, group: Group) -> bool:
        return bool(self._groups[group])

    def count(self, group: Group) -> int:
        return len(self._groups[group])

    def view(self, name: str) -> WorkerView:
        return next(view for view in self._groups["all"] if view.name == name)

    def prompt_worker(self, group: Group, needs_capacity: bool = True) -> WorkerView | None:
        views: Sequence[WorkerView] = self._groups[group]
        if needs_capacity:
            views = with_prefill_slot(views)
        return self._ranking.prompt_worker(views, self._demand, self._now, needs_capacity)

    def answer_worker(self, group: Group, layout: str | None = None) -> WorkerView | None:
        views: Sequence[WorkerView] = self._groups[group]
        if layout is not None:
            views = [view for view in views if view.info.layout == layout]
        if self._demand.is_pinned and not self._demand.has_source:
            views = with_prefill_slot(views)
        return self._ranking.answer_worker(views, self._demand, self._now)

    def single_worker(self) -> WorkerView | None:
        single = single_worker(self._groups["all"], self._now)
        return None if single is None else next(iter(self._able([single])), None)

    def sharing_worker(self) -> WorkerView | None:
        return self.prompt_worker("all") if ignores_roles(self._groups["all"]) else None

    def colocated_worker(self, costs: DisaggregationPolicy) -> WorkerView | None:
        num_tokens = self._demand.num_tokens
        return min(
            self._able(self._groups["answer"]),
            key=lambda view: (costs.colocated_seconds(num_tokens, view), view.name),
            default=None,
        )

    def kept_worker(self) -> WorkerView | None:
        views = self._able(self._groups["kept"])
        return min(views, key=lambda view: (view.num_busy, view.name), default=None)

    def _able(self, views: Sequence[WorkerView]) -> Sequence[WorkerView]:
        return with_prefill_slot(with_capacity(views, self._demand))
