"""The workers that a placement decision compared, with the numbers that it used."""

import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.fleet import Fleet, LoadTable
from penstock.router.routing.placement.policy import Placement
from penstock.router.routing.placement.rankings.cost import PROMPT_WEIGHT, read_cost_of
from penstock.router.routing.placement.rankings.least_loaded import PENALTY_TOKENS
from penstock.router.routing.worker_view import WorkerView

MAX_CANDIDATES = 8
"""Number of workers that are kept of a decision, besides the chosen ones."""


class Candidate(NamedTuple):
    """One worker at the time of a decision.

    Attributes:
        worker: name of the worker.
        role: prefill, decode or mixed.
        state: ready, suspect, stuck or draining.
        cost: work of the prompt there in tokens of prompt computation, see `rankings.cost`; lower
            is better. Only `--routing cost` compares this number.
        queued_tokens: prompt tokens that the worker must compute before.
        num_sequences: sequences on the worker, those of other routers included.
        cached_tokens: leading tokens of the prompt that the worker has cached.
        has_room: whether the worker had room for the request.
    """

    worker: str
    role: str
    state: str
    cost: float
    queued_tokens: int
    num_sequences: int
    cached_tokens: int
    has_room: bool


def candidates_of(
    workers: Sequence[WorkerView], demand: Demand, placement: Placement, now: float
) -> list[Candidate]:
    """Return the workers of least cost and the chosen workers, in order of cost.

    With many workers, the least loaded ones are returned instead: the cached tokens of all workers
    are not compared again.

    Args:
        workers: all connected workers.
        demand: the properties of the request.
        placement: the chosen workers.
        now: clock seconds.
    """
    chosen = (placement.worker, placement.decode_target)
    cached: Mapping[str, int] = demand.cached_tokens or {}
    read_cost, most = read_cost_of(demand), demand.num_tokens - 1

    def cost(view: WorkerView) -> tuple[float, int, int, str]:
        queued, reads, busy, assigned, name = view.by_cost
        saved = PROMPT_WEIGHT * min(cached.get(name, 0), most)
        penalty = PENALTY_TOKENS * view.penalty(now)
        return queued + read_cost * reads - saved + penalty, busy, assigned, name

    if isinstance(workers, Fleet) and workers.loads is not None:
        least = _least_loaded(workers, workers.loads, read_cost)
    else:
        least = heapq.nsmallest(MAX_CANDIDATES, workers, key=cost)
    known = {view.name for view in least}
    least += [view for view in workers if view.name in chosen and view.name not in known]
    return [
        Candidate(
            view.name,
            view.role,
            view.state,
            key[0],
            view.by_cost[0],
            key[1],
            cached.get(view.name, 0),
            view.has_capacity(demand.num_tokens, demand.num_sequences),
        )
        for key, view in sorted((cost(view), view) for view in least)
    ]


def _least_loaded(
    workers: Fleet[WorkerView], loads: LoadTable, read_cost: float
) -> list[WorkerView]:
    """Return the workers of least cost, without regard to cached tokens."""
    load = loads.queued[:-1] + read_cost * loads.reads[:-1]
    rows = np.argpartition(load, MAX_CANDIDATES)[:MAX_CANDIDATES]
    return [workers.by_row[row] for row in rows.tolist()]
