"""Placement by cost, with array operations that compare a router's workers."""

from collections.abc import Sequence

from penstock.router.routing.placement.array_candidates import ArrayCandidates
from penstock.router.routing.placement.cached_prefix import CachedPrefix
from penstock.router.routing.placement.candidates import Candidates
from penstock.router.routing.placement.cheapest_worker import cheapest_worker
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.fleet import Fleet
from penstock.router.routing.placement.policy import Placement, RolePolicy
from penstock.router.routing.placement.rankings.cost import CostRanking
from penstock.router.routing.worker_view import WorkerView


class CostPolicy(RolePolicy):
    """`RolePolicy` with `CostRanking` and a fast path that makes the same choices.

    A choice may differ only if the costs of two workers differ by rounding alone.
    """

    def __init__(self) -> None:
        super().__init__(CostRanking())

    def choose(
        self,
        demand: Demand,
        workers: Sequence[WorkerView],
        transfer_costs: TransferCostModel,
        now: float,
    ) -> Placement | None:
        cached = demand.cached_tokens
        if (
            isinstance(workers, Fleet)
            and workers  # may be empty while the index still has blocks of a lost worker
            and isinstance(cached, CachedPrefix)
            and cached.levels
            and len(workers.groups["prompt"].views) == len(workers)
            and not (demand.has_source or demand.is_pinned or workers[0].queues_at_router)
        ):
            view = cheapest_worker(workers, workers.groups["prompt"], demand, cached, now)
            if view is not None and view.role != "prefill":
                return Placement(view.name)
        return super().choose(demand, workers, transfer_costs, now)

    def _candidates(self, demand: Demand, workers: Sequence[WorkerView], now: float) -> Candidates:
        if (
            isinstance(workers, Fleet)
            and workers
            and not workers[0].queues_at_router
            and (not demand.cached_tokens or isinstance(demand.cached_tokens, CachedPrefix))
        ):
            return ArrayCandidates(demand, workers, now)
        return super()._candidates(demand, workers, now)
