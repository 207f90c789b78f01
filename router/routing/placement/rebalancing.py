"""When to ask another worker, because the one that was asked to take a request has no room yet.

Two workers that are both nearly full must not have a request sent to and fro: the one that was
asked gets some time, each further change of mind takes longer, and only a worker where nothing at
all waits is thought to have room sooner.
"""

from penstock.router.routing.worker_registry import WorkerView

INITIAL_SECONDS = 1.0
"""So long the first worker that was asked may let a request wait for room."""
BACKOFF_FACTOR = 2.0
"""Of that time, with every change of mind."""


def rebalance_delay(num_rebalances: int) -> float:
    """Seconds that a worker has to make room for a request that was taken back so often before."""
    return INITIAL_SECONDS * BACKOFF_FACTOR**num_rebalances


def has_capacity_sooner(
    other: WorkerView, pending: WorkerView, num_tokens: int, num_seqs: int
) -> bool:
    """Whether `other` would begin at once with what waits at `asked`."""
    blocks = other.resource_usage(num_tokens, num_seqs).num_blocks
    idle = not (other.load.queued or other.new_sequences or other.backlog_tokens)
    free = other.load.free_blocks + other.load.cached_blocks
    free_slots = other.info.max_sequences - other.num_busy
    return bool(pending.load.queued) and idle and free >= blocks and free_slots >= num_seqs
