"""When to move a request to another worker because the chosen one has no room yet.

A request must not bounce between two workers that are nearly full. Therefore each worker gets some
time, which doubles with each move, and only a worker without any queue counts as having room
sooner.
"""

from penstock.router.routing.worker_registry import WorkerView

INITIAL_SECONDS = 1.0
"""Time that the first worker gets to make room for a request."""
BACKOFF_FACTOR = 2.0
"""Factor by which that time grows with each move."""


def rebalance_delay(num_rebalances: int) -> float:
    """Return the seconds that a worker gets to make room, after `num_rebalances` moves."""
    return INITIAL_SECONDS * BACKOFF_FACTOR**num_rebalances


def has_capacity_sooner(
    other: WorkerView, pending: WorkerView, num_tokens: int, num_seqs: int
) -> bool:
    """Return whether `other` could start at once a request that waits on `pending`."""
    blocks = other.resource_usage(num_tokens, num_seqs).num_blocks
    idle = not (other.load.queued or other.new_sequences or other.backlog_tokens)
    free = other.load.free_blocks + other.load.cached_blocks
    free_slots = other.info.max_sequences - other.num_busy
    return bool(pending.load.queued) and idle and free >= blocks and free_slots >= num_seqs
