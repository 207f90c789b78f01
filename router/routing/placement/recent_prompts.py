"""Prompts that were just placed, and whose blocks the workers will soon have.

Without this record, two equal prompts that arrive together would go to two workers, and both
workers would compute the whole prompt. A record keeps only some blocks of the prompt: the first
`STRIDE` blocks, and then every `STRIDE`-th. Depths beyond `STRIDE` are therefore rounded down to a
multiple of `STRIDE`.
"""

from collections import Counter, deque
from collections.abc import Sequence

from penstock.router.routing.placement.cached_prefix import Levels
from penstock.router.routing.prefix_cache.prefix_index import START, PrefixIndex
from penstock.router.routing.prefix_cache.worker_slots import Workers, WorkerSlots

STRIDE = 16
"""Distance between recorded blocks, after the first `STRIDE` blocks."""
KEPT_SECONDS = 2.0
"""Time for which a record is kept after the worker has computed the prompt.

By then the worker has reported the blocks.
"""
MAX_EXPIRED = 16
"""Maximum number of records that one call of `expire` removes; this takes less than 1 ms."""


class RecentPrompts:
    """Records of prompts that workers will compute or have just computed, by request.

    Args:
        slots: numbers of the workers in the bit masks of `levels`.
    """

    def __init__(self, slots: WorkerSlots) -> None:
        self.index = PrefixIndex(slots)  # index of the recorded blocks
        # For each request, its worker and its recorded blocks.
        self._prompts: dict[int, tuple[str, Sequence[int]]] = {}
        # For each worker and block, how many of the worker's recorded prompts contain the block.
        self._counts: dict[str, Counter[int]] = {}
        # Records to remove, as (time, request, worker).
        self._ending: deque[tuple[float, int, str]] = deque()

    def __len__(self) -> int:
        return len(self._prompts)

    def add(self, request: int, worker: str, hashes: Sequence[int]) -> None:
        """Record that a worker computes a prompt. This replaces an earlier record of `request`."""
        self.remove(request)
        if not hashes:
            return
        blocks = _recorded(hashes)
        self._prompts[request] = (worker, blocks)
        self._counts.setdefault(worker, Counter()).update(blocks)
        self.index.store(worker, blocks, START)

    def end(self, request: int, now: float) -> None:
        """Remove a record `KEPT_SECONDS` from now, because its prompt has been computed."""
        prompt = self._prompts.get(request)
        if prompt is not None:
            self._ending.append((now + KEPT_SECONDS, request, prompt[0]))

    def remove(self, request: int) -> None:
        """Remove a record immediately, because no worker will compute the prompt."""
        prompt = self._prompts.pop(request, None)
        if prompt is None:
            return
        worker, blocks = prompt
        counts = self._counts[worker]
        unused = []
        for block in reversed(blocks):
            counts[block] -= 1
            if not counts[block]:
                del counts[block]
                unused.append(block)
        self.index.evict(worker, unused)
        if not counts:
            del self._counts[worker]
            self.index.clear(worker)

    def expire(self, now: float) -> None:
        """Remove records for which `end` was called at least `KEPT_SECONDS` ago.

        At most `MAX_EXPIRED` records are removed, the oldest first.
        """
        for _ in range(MAX_EXPIRED):
            if not self._ending or self._ending[0][0] > now:
                return
            _, request, worker = self._ending.popleft()
            if self._prompts.get(request, ("",))[0] == worker:
                self.remove(request)

    def exceeds(self, hashes: Sequence[int], levels: Levels) -> bool:
        """Return whether `self.levels(hashes)` has a larger depth than `levels` for some worker.

        If the depth of a worker in `levels` is `d`, only the first recorded block beyond `d` is
        looked up. If no worker has this block, no worker has a later one either, so the search
        ends. This takes a fraction of the time of `self.levels`.
        """
        workers, holders, num_hashes, depth = self.index.workers, self.index.holders, len(hashes), 0
        for next_depth, deeper in (*levels, (0, 0)):
            if workers & ~deeper:
                at = depth if depth < STRIDE else depth - depth % STRIDE + STRIDE - 1
                workers = holders(hashes[at]) if at < num_hashes else 0
                if workers & ~deeper:
                    return True
                if not workers:
                    return False
            depth = next_depth
        return False

    def levels(self, hashes: Sequence[int]) -> list[tuple[int, Workers]]:
        """Return `PrefixIndex.levels` for the blocks that the workers will soon have."""
        if not hashes or self.index.is_empty:
            return []
        levels = self.index.levels(_recorded(hashes))
        return [
            (number if number <= STRIDE else (number - STRIDE + 1) * STRIDE, workers)
            for number, workers in levels
        ]


def _recorded(hashes: Sequence[int]) -> Sequence[int]:
    """Return the recorded blocks of a prompt.

    These are the first `STRIDE` blocks, and the last block of each later stride.
    """
    return [*hashes[:STRIDE], *hashes[2 * STRIDE - 1 :: STRIDE]]
