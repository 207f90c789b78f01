"""The properties of a request that placement uses."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from types import MappingProxyType
from typing import NamedTuple


class Demand(NamedTuple):
    """The properties of a request that matter for placement."""

    request: int
    num_tokens: int  # number of prompt tokens and answer tokens so far
    num_sequences: int
    num_remaining: int  # largest number of tokens still to generate
    has_source: bool = False  # a worker has the request's KV blocks, so no prefill is needed
    unfit_workers: AbstractSet[str] = frozenset()  # workers that are too small for the request
    is_pinned: bool = False  # whether one worker must compute both prompt and answer
    router_queue_tokens: int = 0  # prompt tokens queued at the router
    tpot_slo_seconds: float = 0.0  # upper bound of the time per token; 0 means no bound
    # For each worker, the leading tokens that it has cached or is about to compute.
    # The value is None if nothing is known, and workers without such tokens are absent.
    cached_tokens: Mapping[str, int] | None = None
    # For each block size, the short hashes of the prompt's full blocks.
    prompt_hashes: Mapping[int, Sequence[int]] = MappingProxyType({})

    def num_uncached(self, worker: str) -> int:
        """Return the number of tokens that a worker must compute.

        Without knowledge about cached tokens, these are all tokens.
        """
        if not self.cached_tokens:
            return self.num_tokens
        return max(self.num_tokens - self.cached_tokens.get(worker, 0), 1)
