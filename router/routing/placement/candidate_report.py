"""The workers that a placement decision compared, with the numbers that it used."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.fleet import Fleet
from penstock.router.routing.placement.policy import Placement
from penstock.router.routing.placement.rankings.cost import PROMPT_WEIGHT, read_cost_of
from penstock.router.routing.placement.rankings.least_loaded import PENALTY_TOKENS
from penstock.router.routing.worker_view import PENALTY_SECONDS, WorkerView

MAX_CANDIDATES = 8
"""Largest number of workers in the report of a decision, besides the chosen ones."""

MANY_WORKERS = 48
"""From this number of workers on, only the least loaded ones and the chosen ones are compared."""


class Candidate(NamedTuple):
    """One worker at the time of a decision.

    Attributes:
        worker: name of the worker.
        role: prefill, decode or mixed.
        state: ready, suspect, stuck or draining.
        cost: work of computing the prompt at this worker, in tokens (see `rankings.cost`); lower is
            better. Only `--routing cost` compares this number.
        queued_tokens: prompt tokens that the worker must compute before this prompt.
        num_sequences: sequences on the worker, those of other routers included.
        cached_tokens: leading tokens of the prompt that the worker has cached.
        has_capacity: whether the worker had room for the request.
    """

    worker: str
    role: str
    state: str
    cost: float
    queued_tokens: int
    num_sequences: int
    cached_tokens: int
    has_capacity: bool


def candidates_of(
    workers: Sequence[WorkerView], demand: Demand, placement: Placement, now: float
) -> list[Candidate]:
    """Return the workers of least cost and the chosen workers, in order of cost.

    If there are many workers, the least loaded ones are returned instead of those of least cost,
    since comparing the cached tokens of all workers again would take too long.

    Args:
        workers: all connected workers.
        demand: the properties of the request.
        placement: the chosen workers.
        now: the time, in seconds of the router's monotonic clock.
    """
    chosen = (placement.worker, placement.decode_target)
    cached: Mapping[str, int] = demand.cached_tokens or {}
    read_cost, most = read_cost_of(demand), demand.num_tokens - 1
    since = now - PENALTY_SECONDS
    ranked = []
    for view in _considered(workers, read_cost, chosen):
        queued, reads, busy, assigned, name = view.by_cost
        cost = queued + read_cost * reads
        if name in cached:
            cost -= PROMPT_WEIGHT * min(cached[name], most)
        if view.lost_at > since:
            cost += PENALTY_TOKENS * view.penalty(now)
        ranked.append((cost, busy, assigned, name, view))
    ranked.sort()  # the sort never compares views, because the names before them differ
    kept = ranked[:MAX_CANDIDATES]
    kept += [row for row in ranked[MAX_CANDIDATES:] if row[3] in chosen]
    return [
        Candidate(
            name,
            view.role,
            view.state,
            cost,
            view.by_cost[0],
            busy,
            cached.get(name, 0),
            view.has_capacity(demand.num_tokens, demand.num_sequences),
        )
        for cost, busy, _, name, view in kept
    ]


def _considered(
    workers: Sequence[WorkerView], read_cost: float, chosen: Sequence[str | None]
) -> Sequence[WorkerView]:
    """Return all workers if they are few.

    Otherwise return the chosen workers and the least loaded ones.
    """
    if not isinstance(workers, Fleet) or len(workers) < MANY_WORKERS:
        return workers
    load = workers.loads.queued + read_cost * workers.loads.reads
    last = min(MAX_CANDIDATES, len(load) - 1)
    rows = set(np.argpartition(load, last)[:MAX_CANDIDATES].tolist())
    for name in chosen:
        if name is not None:
            rows.add(workers.row(name))
    return [workers.by_row[row] for row in rows]
