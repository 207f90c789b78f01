"""Ranking by consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2016).

Prompts that begin alike have the same key and go to the same worker, without any knowledge of
caches. If this worker has more than its share of the load, the next worker in the key's order is
used. Each key orders the workers by rendezvous hashing. If a worker is lost, only the keys of that
worker move.
"""

from collections.abc import Callable, Mapping, Sequence

from penstock.router.routing.placement.demand import Demand
from penstock.router.routing.placement.ranking import with_capacity
from penstock.router.routing.placement.rankings.hashing import mix, name_hash
from penstock.router.routing.worker_view import WorkerView

KEY_TOKENS = 1024
"""Number of leading tokens that determine the key of a longer prompt."""
EXCESS = 0.25
"""Fraction of the mean load by which a worker's load may exceed the mean."""


class ConsistentHashRanking:
    """Prefers the first worker in the prompt's hash order whose load is within the bound."""

    def prompt_worker(
        self, views: Sequence[WorkerView], demand: Demand, now: float, needs_capacity: bool = True
    ) -> WorkerView | None:
        able = with_capacity(views, demand) if needs_capacity else views
        return _first(able, demand, lambda view: view.backlog_tokens, demand.num_tokens)

    def answer_worker(
        self, views: Sequence[WorkerView], demand: Demand, now: float
    ) -> WorkerView | None:
        able = with_capacity(views, demand)
        return _first(able, demand, lambda view: view.num_busy, demand.num_sequences)


def prefix_key(prompt_hashes: Mapping[int, Sequence[int]]) -> int | None:
    """Return the key for consistent hashing, which is equal for prompts with a common prefix.

    Args:
        prompt_hashes: short hashes of the prompt's full blocks, by block size.

    Returns:
        None if there are no hashes: they were not computed, or the prompt has no full block.
    """
    for block_size, hashes in sorted(prompt_hashes.items()):
        if hashes:
            return hashes[min(len(hashes), max(KEY_TOKENS // block_size, 1)) - 1]
    return None


def _first(
    views: Sequence[WorkerView], demand: Demand, load: Callable[[WorkerView], int], own: int
) -> WorkerView | None:
    """Return the first worker whose load stays within the bound if it gets the request.

    `own` is the load of the request. The bound is at least `own`, so it never excludes an idle
    worker. If it excludes all workers, the first one is returned.
    """
    if not views:
        return None
    key = prefix_key(demand.prompt_hashes)
    if key is None:
        key = mix(demand.request)
    bound = max((1 + EXCESS) * (sum(map(load, views)) + own) / len(views), own)
    within = [view for view in views if load(view) + own <= bound]
    return min(within or views, key=lambda view: (mix(key ^ name_hash(view.name)), view.name))
