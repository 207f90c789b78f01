"""Detects workers that report cached blocks which they do not have.

The events of such a worker can be consistent, so `cache_feed` does not detect it. When a worker
admits a request, it reports how many prompt tokens it has found in its cache. If it has evicted no
block since the request was placed, it must have found at least as many tokens as the index had for
this worker at that time.
"""

from collections import Counter
from typing import NamedTuple

from penstock.router.routing.prefix_cache.prefix_index import PrefixIndex

MAX_CONTRADICTIONS = 4
"""Number of successive requests for which a worker must have found too few tokens."""


class CacheClaim(NamedTuple):
    """The number of prompt tokens that a worker must find in its cache for a request."""

    worker: str
    attempt: int  # attempt of the request
    num_tokens: int
    num_removals: int  # `PrefixIndex.num_removals` of the worker when the request was placed


class CacheClaims:
    """Compares what workers find in their caches with what they have reported.

    Args:
        index: the blocks that workers have reported.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        # For each worker, the number of successive requests for which it found too few tokens.
        self._contradictions: Counter[str] = Counter()

    def claim(self, worker: str, attempt: int, num_tokens: int) -> CacheClaim:
        """Return the claim of a worker to which a request is submitted now."""
        return CacheClaim(worker, attempt, num_tokens, self._index.num_removals(worker))

    def is_refuted(self, claim: CacheClaim, num_found: int) -> bool:
        """Return whether a worker has contradicted its reports `MAX_CONTRADICTIONS` times in a row.

        Args:
            claim: the claim of the worker for a request.
            num_found: the prompt tokens that the worker has found in its cache. The worker's events
                up to the admission of the request must have been applied.
        """
        worker = claim.worker
        if not claim.num_tokens or claim.num_removals != self._index.num_removals(worker):
            return False
        if num_found >= claim.num_tokens:
            del self._contradictions[worker]
            return False
        self._contradictions[worker] += 1
        if self._contradictions[worker] < MAX_CONTRADICTIONS:
            return False
        del self._contradictions[worker]
        return True
