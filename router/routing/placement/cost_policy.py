"""Placement by cost, with a fast path for clusters in which all workers have both roles."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.router.routing.placement.cached_prefix import CachedPrefix
from penstock.router.routing.placement.cost_model import TransferCostModel
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.fleet import Fleet, LoadTable
from penstock.router.routing.placement.policy import Placement, RolePolicy
from penstock.router.routing.placement.rankings.cost import (
    PROMPT_WEIGHT,
    CostRanking,
    read_cost_of,
)
from penstock.router.routing.prefix_cache.prefix_index import bits
from penstock.router.routing.worker_view import PENALTY_SECONDS, WorkerView

NUM_TRIES = 8
"""Number of workers that the fast path tries in order of cost, before `RolePolicy` chooses."""

FEW_WORKERS = 8
"""Up to this size, a loop over a set's bits is faster than unpacking the bits to an array."""


class CostPolicy(RolePolicy):
    """`RolePolicy` with `CostRanking`, and with a fast path that makes the same choices."""

    def __init__(self) -> None:
        super().__init__(CostRanking())

    def choose(
        self,
        demand: Demand,
        workers: Sequence[WorkerView],
        transfer_costs: TransferCostModel,
        now: float,
    ) -> Placement | None:
        if (
            isinstance(workers, Fleet)
            and workers.is_mixed
            and not (demand.has_source or demand.is_pinned or demand.unfit_workers)
            and not workers[0].queues_at_router
            and now - workers.lost_at >= PENALTY_SECONDS
        ):
            view = (
                _cheapest(workers.by_row, demand)
                if workers.loads is None
                else _cheapest_row(workers, workers.loads, demand)
            )
            if view is not None:
                return Placement(view.name)
        return super().choose(demand, workers, transfer_costs, now)


def _cheapest(workers: Sequence[WorkerView], demand: Demand) -> WorkerView | None:
    """Return the worker with the lowest cost that has capacity."""
    cached: Mapping[str, int] = demand.cached_tokens or {}
    if isinstance(cached, CachedPrefix):
        cached = cached.as_dict()
    read_cost, most = read_cost_of(demand), demand.num_tokens - 1
    num_tokens, num_sequences = demand.num_tokens, demand.num_sequences
    best, lowest = None, (float("inf"), 0, 0)
    for view in workers:
        queued, reads, busy, assigned, name = view.by_cost
        cost = queued + read_cost * reads
        if name in cached:
            cost -= PROMPT_WEIGHT * min(cached[name], most)
        if cost > lowest[0]:
            continue
        key = (cost, busy, assigned)
        # Workers are in order of their names, so the first one of equal keys stays.
        if key < lowest and view.is_usable and view.has_capacity(num_tokens, num_sequences):
            best, lowest = view, key
    return best


def _cheapest_row(
    workers: Fleet[WorkerView], loads: LoadTable, demand: Demand
) -> WorkerView | None:
    """Return the same as `_cheapest`, by array operations; None after `NUM_TRIES` full workers."""
    cost = loads.queued + read_cost_of(demand) * loads.reads
    if demand.cached_tokens:
        saved = _saved_tokens(workers, demand.cached_tokens)
        np.minimum(saved, demand.num_tokens - 1, out=saved)
        saved *= PROMPT_WEIGHT
        cost -= saved
    for _ in range(NUM_TRIES):
        row = int(cost.argmin())
        equal = np.flatnonzero(cost == cost[row])
        if len(equal) > 1:
            row = int(equal[loads.ties[equal].argmin()])
        if cost[row] == np.inf:
            return None
        view = workers.by_row[row]
        if view.is_usable and view.has_capacity(demand.num_tokens, demand.num_sequences):
            return view
        cost[row] = np.inf
    return None


def _saved_tokens(workers: Fleet[WorkerView], cached: Mapping[str, int]) -> npt.NDArray[np.float64]:
    """Return the number of cached tokens of the worker in each row."""
    saved = np.zeros(len(workers) + 1)
    if not isinstance(cached, CachedPrefix):
        for row, view in enumerate(workers.by_row):
            saved[row] = cached.get(view.name, 0)
        return saved
    for index, levels in cached.sources:
        rows = workers.rows_by_slot(index)
        for num_tokens, mask in levels:
            if mask.bit_count() <= FEW_WORKERS:
                those = rows[list(bits(mask))]
            else:
                packed = np.frombuffer(mask.to_bytes(-(-len(rows) // 8), "little"), np.uint8)
                has = np.unpackbits(packed, count=len(rows), bitorder="little")
                those = rows[has.view(np.bool_)]
            saved[those] = np.maximum(saved[those], num_tokens)
    return saved
