"""Knowledge of the workers' prefix caches: the blocks that workers report, and recent prompts."""

from collections.abc import Mapping

from penstock.router.routing.events import Request
from penstock.router.routing.placement.cached_prefix import CachedPrefix, Levels, merge_levels
from penstock.router.routing.placement.recent_prompts import RecentPrompts
from penstock.router.routing.prefix_cache.prefix_index import PrefixIndex


class PrefixKnowledge:
    """Estimates how many prompt tokens each worker has cached and need not compute.

    Args:
        index: the blocks that workers have reported.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index
        self._recent = RecentPrompts(index.slots)

    def cached_tokens(self, request: Request, now: float) -> Mapping[str, int] | None:
        """Return how many leading prompt tokens each worker has cached or is about to compute.

        Workers without such tokens are absent. The result is None if nothing is known, because the
        prompt has no hashes or no worker reports its blocks.
        """
        if not request.prompt_hashes or self._index.is_empty:
            return None
        if request.params.prompt_logprobs is not None:
            return {}  # prompt logprobs need the whole prompt to be computed, without cached blocks
        self._recent.expire(now)
        sources: list[tuple[int, Levels]] = []
        for block_size, hashes in request.prompt_hashes.items():
            levels: Levels = self._index.levels(hashes)
            sources.append((block_size, levels))
            if self._recent.exceeds(hashes, levels):
                sources.append((block_size, self._recent.levels(hashes)))
        if len(sources) == 1:
            ((block_size, levels),) = sources
            return CachedPrefix(self._index.slots, levels, block_size, is_reported=True)
        return CachedPrefix(self._index.slots, merge_levels(sources))

    def placed(self, request: Request, worker: str, block_size: int) -> None:
        """Record that a worker computes the prompt of a request."""
        self._recent.add(request.id, worker, request.prompt_hashes.get(block_size, ()))

    def computed(self, request: int, now: float) -> None:
        """Record that a prompt has been computed, so that its worker now reports the blocks."""
        # This method is called for every record, and `expire` removes several records per call, so
        # records cannot accumulate.
        self._recent.expire(now)
        self._recent.end(request, now)

    def withdrawn(self, request: int) -> None:
        """Record that no worker computes the prompt of a request any more."""
        self._recent.remove(request)
