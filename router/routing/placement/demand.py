"""The properties of a request that placement uses."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import NamedTuple


class Demand(NamedTuple):
    """The properties of a request that matter for placement."""

    request: int
    num_tokens: int  # prompt tokens and answer tokens so far
    num_sequences: int
    num_remaining: int  # largest number of tokens still to generate
    has_source: bool = False  # a worker has KV blocks of the request: no prefill needed
    unfit_workers: AbstractSet[str] = frozenset()  # workers too small for the request
    is_pinned: bool = False  # prompt and answer must be computed on one worker
    router_queue_tokens: int = 0  # prompt tokens queued at the router
    tpot_slo_seconds: float = 0.0  # upper bound of the time per token; 0: none
    # Leading tokens that each worker has cached or is about to compute. Workers without such
    # tokens are absent; None: nothing is known.
    cached_tokens: Mapping[str, int] | None = None
    # Short hashes of the prompt's full blocks, by block size.
    prompt_hashes: Mapping[int, Sequence[int]] = MappingProxyType({})

    def num_uncached(self, worker: str) -> int:
        """Return the number of tokens that a worker must compute; all if nothing is known."""
        if not self.cached_tokens:
            return self.num_tokens
        return max(self.num_tokens - self.cached_tokens.get(worker, 0), 1)
