"""Rules for moving a waiting request to another worker because its worker has no room yet.

A request must not bounce between two workers that are nearly full. Therefore each worker gets some
time to make room, and this time doubles with each move. A request moves only to a worker that has
no queue.
"""

from penstock.router.routing.worker_registry import WorkerView

INITIAL_SECONDS = 1.0
"""Time that the first worker gets to make room for a request."""
BACKOFF_FACTOR = 2.0
"""`rebalance_delay` is multiplied by this for each move."""


def rebalance_delay(num_rebalances: int) -> float:
    """Return the seconds that the next worker gets to make room after `num_rebalances` moves."""
    return INITIAL_SECONDS * BACKOFF_FACTOR**num_rebalances


def has_capacity_sooner(
    other: WorkerView, pending: WorkerView, num_tokens: int, num_seqs: int
) -> bool:
    """Return whether `other` could now start a request that waits for room on `pending`."""
    blocks = other.resource_usage(num_tokens, num_seqs).num_blocks
    idle = not (other.load.queued or other.new_sequences or other.backlog_tokens)
    free = other.load.free_blocks + other.load.cached_blocks
    free_slots = other.info.max_sequences - other.num_busy
    return bool(pending.load.queued) and idle and free >= blocks and free_slots >= num_seqs
