"""Finds the worker for a prompt quickly if a worker with cached tokens is clearly the cheapest.

This is the first step of the search for the worker that computes a prompt. It computes the costs of
the few workers with the longest cached prefixes, and then of those with shorter ones. It stops when
the lowest of these costs is below a lower bound of all other costs.
"""

from math import inf

from penstock.router.routing.placement.cached_prefix import CachedPrefix
from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.fleet import (
    KV_READ_COST,
    MAX_READS,
    Fleet,
    LoadTable,
    WorkerGroup,
)
from penstock.router.routing.placement.least_row import least_of
from penstock.router.routing.placement.rankings.cost import PROMPT_WEIGHT, read_cost_of
from penstock.router.routing.worker_view import PENALTY_SECONDS, WorkerView

FEW_WORKERS = 8
"""Maximum number of workers whose costs are computed."""
MARGIN = 1e-3
"""A worker is clearly cheaper than another if its cost is lower by more than this many tokens."""
NEARLY_ONE = 0.95
"""If its weight is at least this, `_least_load` ignores the term of the queues to save time."""


def cheapest_worker(
    workers: Fleet[WorkerView],
    group: WorkerGroup[WorkerView],
    demand: Demand,
    cached: CachedPrefix,
    now: float,
) -> WorkerView | None:
    """Return the worker of lowest cost for the prompt, or None if a full search is needed.

    Args:
        workers: all workers; none of them has `queues_at_router`.
        group: the candidates; not empty.
        demand: the request; it needs a prompt worker.
        cached: the cached tokens of the prompt; not empty.
        now: the time, in seconds of the router's monotonic clock.
    """
    if now - workers.last_lost_at < PENALTY_SECONDS:
        return None
    levels, unit, most = cached.levels, cached.unit, demand.num_tokens - 1
    rows, views, read_cost = workers.use_slots(cached.slots), workers.by_row, read_cost_of(demand)
    queued, reads, candidates = workers.loads.queued, workers.loads.reads, group.mask
    best, lowest, above, num_seen, least_load = -1, inf, 0, 0, -1.0
    for level in range(len(levels) - 1, -1, -1):
        depth, holders = levels[level]
        those, above = holders & candidates & ~above, holders
        num_seen += those.bit_count()
        if num_seen > FEW_WORKERS:
            return None
        saved = PROMPT_WEIGHT * min(depth * unit, most)
        while those:
            slot = those.bit_length() - 1
            those ^= 1 << slot
            row = rows[slot]
            cost = queued.item(row) + read_cost * reads.item(row) - saved
            if cost < lowest - MARGIN:
                best, lowest = row, cost
            elif cost < lowest + MARGIN:
                best = -1  # nearly the same cost, so a full search must decide
        if least_load < 0:
            least_load = _least_load(group.loads, read_cost)
        others_saved = PROMPT_WEIGHT * min(levels[level - 1][0] * unit, most) if level else 0.0
        if lowest < least_load - others_saved - MARGIN:
            break
    else:
        return None
    if best < 0 or (demand.unfit_workers and views[best].name in demand.unfit_workers):
        return None
    view = views[best]
    is_fit = view.has_capacity(demand.num_tokens, demand.num_sequences) and view.is_usable
    return view if is_fit else None


def _least_load(loads: LoadTable, read_cost: float) -> float:
    """Return a lower bound of the costs of all workers without cached tokens.

    If the read cost is `weight` times the largest possible read cost, a worker's cost is as
    follows. The bound is the sum of the smallest values of the two terms.

        queued + weight * largest * reads
            = (1 - weight) * queued + weight * (queued + largest * reads)
    """
    weight = read_cost / (KV_READ_COST * MAX_READS)
    bound = weight * least_of(loads.cost)
    if weight < NEARLY_ONE:
        bound += (1 - weight) * least_of(loads.queued)
    return bound
