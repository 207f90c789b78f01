"""Index of the KV blocks that each worker has cached, by the short hashes of the blocks.

The hash of a block covers all tokens before it, so hashes form trees: each block has one parent.
A block of a worker is **reachable** if the worker is known to have all blocks before it. Along a
prompt, the sets of workers with a reachable block only shrink, so `levels` finds the depths where
they change by bisection. All other blocks of a worker are **loose**: their parent is missing or
unknown. `levels` checks for loose blocks where a set shrinks, and links those that continue the
prompt. The result is therefore exact for stores and evictions in any order.
"""

from collections.abc import Iterable, Mapping, Sequence

from penstock.router.routing.prefix_cache.worker_slots import Workers, WorkerSlots, bits

PRUNED_CHILDREN = 16
"""Size at which a set of children is searched for unreachable ones, and again at each doubling."""
START = 0
"""The parent of the first block of a prompt. No block has this hash."""


class PrefixIndex:
    """The set of cached blocks of each worker.

    Hashes are unsigned 64-bit integers: see `short_hash` of `penstock.common.block_hash`.

    Args:
        slots: the numbers of workers in sets; None: numbers of this index only.
    """

    def __init__(self, slots: WorkerSlots | None = None) -> None:
        self.slots = WorkerSlots() if slots is None else slots
        self._slots: dict[str, int] = {}  # slot by worker of this index
        self._bits: dict[int, Workers] = {}  # 1 << slot, by slot: one int object for many blocks
        self._blocks: dict[int, set[int]] = {}  # all blocks of a worker, by slot
        self._reachable: dict[int, Workers] = {}
        self._loose: dict[int, Workers] = {}
        self._children = _Children(self._reachable)
        # Guess of a level's length, by its first block: the length in the last match, or that of
        # the stored chain. A good guess saves most look-ups; each may cost several cache misses.
        self._hints: dict[int, int] = {}

    def slot(self, worker: str) -> int:
        """Return the number of the worker's bit; a new worker gets a free number."""
        slot = self._slots.get(worker)
        if slot is None:
            slot = self._slots[worker] = self.slots.acquire(worker)
            self._bits[slot] = 1 << slot
            self._blocks[slot] = set()
        return slot

    def store(self, worker: str, hashes: Sequence[int], parent: int | None = None) -> None:
        """Add blocks of a worker; blocks that the worker has already are ignored.

        Args:
            worker: name of the worker.
            hashes: the blocks, in any order if there is no `parent`.
            parent: the block before `hashes[0]`, or `START`. If given, `hashes` are consecutive
                blocks. This saves the later search for the positions of the blocks.
        """
        slot = self.slot(worker)
        bit, blocks = self._bits[slot], self._blocks[slot]
        if parent is None:
            for block in hashes:
                if block not in blocks:
                    blocks.add(block)
                    _add(self._loose, block, bit)
            return
        is_linked = parent == START or bool(self._reachable.get(parent, 0) & bit)
        if is_linked and hashes:
            self._hints.setdefault(hashes[0], len(hashes))
        for block in hashes:
            if block not in blocks:
                blocks.add(block)
                if is_linked:
                    self._link(block, parent, bit)
                else:
                    _add(self._loose, block, bit)
            elif is_linked:
                if self._loose.get(block, 0) & bit:
                    _remove(self._loose, block, bit)
                    self._link(block, parent, bit)
            else:
                is_linked = bool(self._reachable.get(block, 0) & bit)
            parent = block

    def evict(self, worker: str, hashes: Sequence[int]) -> None:
        """Remove blocks of a worker; blocks that the worker does not have are ignored."""
        slot = self._slots.get(worker)
        if slot is None:
            return
        bit, blocks = self._bits[slot], self._blocks[slot]
        for block in hashes:
            if block not in blocks:
                continue
            blocks.remove(block)
            if self._loose and self._loose.get(block, 0) & bit:
                _remove(self._loose, block, bit)
                continue
            self._loosen_children(block, bit)
            self._unlink(block, bit)

    def clear(self, worker: str) -> None:
        """Remove all blocks of a worker."""
        slot = self._slots.pop(worker, None)
        if slot is None:
            return
        bit = self._bits[slot]
        for block in self._blocks[slot]:
            if self._reachable.get(block, 0) & bit:
                self._unlink(block, bit)
            else:
                _remove(self._loose, block, bit)
        del self._blocks[slot], self._bits[slot]
        self.slots.release(worker)

    @property
    def is_empty(self) -> bool:
        """Whether no worker has a block."""
        return not (self._reachable or self._loose)

    def num_blocks(self, worker: str) -> int:
        """Return the number of blocks of a worker."""
        slot = self._slots.get(worker)
        return 0 if slot is None else len(self._blocks[slot])

    def holds(self, worker: str, block: int) -> bool:
        """Return whether a worker has a block, with or without the blocks before it."""
        slot = self._slots.get(worker)
        return slot is not None and block in self._blocks[slot]

    def holders(self, block: int) -> Workers:
        """Return the workers that are known to have a block and all blocks before it."""
        return self._reachable.get(block, 0)

    def match(self, hashes: Sequence[int]) -> Mapping[str, int]:
        """Return how many leading blocks of a prompt each worker has; absent workers have none.

        Args:
            hashes: the short hashes of the prompt's full blocks, in order.
        """
        found: dict[str, int] = {}
        for depth, workers in self.levels(hashes):
            for slot in bits(workers):
                found[self.slots.names[slot]] = depth
        return found

    def levels(self, hashes: Sequence[int]) -> list[tuple[int, Workers]]:
        """Return pairs of a depth and the workers that have at least `depth` leading blocks.

        Each set of workers is a proper subset of the one before, and the depths rise. Workers
        without the first block are in no set.
        """
        if len(hashes) == 1:  # perhaps not the first block of a prompt: do not link it
            holders = self._reachable.get(hashes[0], 0) | self._loose.get(hashes[0], 0)
            return [(1, holders)] if holders else []
        while True:
            levels = self._reachable_levels(hashes)
            if not (self._loose and self._link_loose(hashes, levels)):
                return levels

    def _reachable_levels(self, hashes: Sequence[int]) -> list[tuple[int, Workers]]:
        """Return `levels` of the reachable blocks: bisect for each depth where the set changes."""
        levels: list[tuple[int, Workers]] = []
        if not hashes:
            return levels
        get = self._reachable.get
        workers, low = get(hashes[0], 0), 0
        known = [(len(hashes), 0)]  # larger positions with their sets, the nearest last
        while workers:
            start, first = low, hashes[low]
            while known[-1][1] & workers == workers:
                low, _ = known.pop()
            high, others = known[-1]
            # Look first on both sides of the position where the set changed last time.
            length = self._hints.get(first, 0)
            hint = start + length
            middle = max(hint - 1, low + 1) if length else 0
            while high - low > 1:
                if not low < middle < high:
                    middle = (low + high) >> 1
                found = get(hashes[middle], 0)
                if found & workers == workers:
                    low = middle
                else:
                    high, others = middle, found
                    known.append((high, others))
                middle = hint
            if high != hint:
                self._hints[first] = high - start
            levels.append((high, workers))
            workers, low = others & workers, high
        return levels

    def _link_loose(self, hashes: Sequence[int], levels: Sequence[tuple[int, Workers]]) -> bool:
        """Link the loose blocks that continue the prompt; return whether there are any."""
        is_changed = False
        first = self._loose.get(hashes[0], 0) if hashes else 0
        starts = [(0, first)] if first else []
        starts += [
            (depth, workers & self._loose.get(hashes[depth], 0))
            for depth, workers in levels
            if depth < len(hashes)
        ]
        for depth, workers in starts:
            while workers:
                is_changed = True
                block = hashes[depth]
                _remove(self._loose, block, workers)
                self._link(block, hashes[depth - 1] if depth else START, workers)
                depth += 1
                if depth == len(hashes):
                    break
                workers &= self._loose.get(hashes[depth], 0)
        return is_changed

    def _link(self, block: int, parent: int, workers: Workers) -> None:
        """Make a block of some workers reachable."""
        old = self._reachable.get(block)
        if old is None:
            self._reachable[block] = workers
            if parent != START:
                self._children.add(parent, block)
        else:
            self._reachable[block] = old | workers

    def _unlink(self, block: int, bit: Workers) -> None:
        """Remove a worker's bit from a reachable block."""
        if not _remove(self._reachable, block, bit):
            self._children.forget(block)
            self._hints.pop(block, None)

    def _loosen_children(self, block: int, bit: Workers) -> None:
        """Make the reachable blocks after `block` loose at a worker."""
        after = self._reachable_children(block, bit)
        while after:
            child = after.pop()
            after += self._reachable_children(child, bit)
            _add(self._loose, child, bit)
            self._unlink(child, bit)

    def _reachable_children(self, block: int, bit: Workers) -> list[int]:
        return [child for child in self._children.of(block) if self._reachable.get(child, 0) & bit]


class _Children:
    """The blocks that follow each block; blocks that are no longer reachable may be included.

    Args:
        reachable: the reachable blocks; all children that it contains are kept.
    """

    def __init__(self, reachable: Mapping[int, Workers]) -> None:
        self._reachable = reachable
        self._of: dict[int, int | set[int]] = {}  # no set for an only child: saves memory
        self._limits: dict[int, int] = {}  # number of children at which a set is pruned

    def of(self, block: int) -> Iterable[int]:
        children = self._of.get(block)
        if children is None:
            return ()
        return children if isinstance(children, set) else (children,)

    def add(self, block: int, child: int) -> None:
        children = self._of.get(block)
        if isinstance(children, set):
            children.add(child)
            if len(children) >= self._limits[block]:
                self._prune(block, children)
        elif children is None or children not in self._reachable:
            self._of[block] = child
        elif children != child:
            self._of[block] = {children, child}
            self._limits[block] = PRUNED_CHILDREN

    def forget(self, block: int) -> None:
        """Remove a block that is no longer reachable at any worker, with its list of children."""
        if isinstance(self._of.pop(block, None), set):
            del self._limits[block]

    def _prune(self, block: int, children: set[int]) -> None:
        kept = {child for child in children if child in self._reachable}
        self._of[block] = kept
        self._limits[block] = max(2 * len(kept), PRUNED_CHILDREN)


def _add(sets: dict[int, Workers], block: int, workers: Workers) -> None:
    old = sets.get(block)
    sets[block] = workers if old is None else old | workers


def _remove(sets: dict[int, Workers], block: int, workers: Workers) -> Workers:
    """Remove `workers`, which the set must contain; return the rest."""
    rest = sets[block] ^ workers
    if rest:
        sets[block] = rest
    else:
        del sets[block]
    return rest
