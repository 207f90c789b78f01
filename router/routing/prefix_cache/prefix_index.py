"""Index of the KV blocks that each worker has cached, by the short hashes of the blocks.

A block of a worker is **reachable** if the worker is known to have all blocks before it. Reachable
blocks are in a radix tree, so a match takes one look-up for each run of blocks. All other blocks of
a worker are **loose**: their parent is missing or unknown. Before it returns, `levels` looks for
loose blocks at each depth where some workers have no further block in the tree. It moves the loose
blocks that continue the prompt into the tree. The result is therefore exact, in whatever order
blocks are stored and evicted.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from penstock.router.routing.prefix_cache.radix_tree import START, RadixTree
from penstock.router.routing.prefix_cache.worker_slots import Workers, WorkerSlots, bits

__all__ = ["START", "PrefixIndex"]

PURGED_BLOCKS = 4096
"""Number of blocks that one call of `PrefixIndex.purge` removes: about 2 ms in a large index."""


class PrefixIndex:
    """The set of cached blocks of each worker.

    Hashes are unsigned 64-bit integers: see `short_hash` of `penstock.common.block_hash`.

    Args:
        slots: assigns the slots of workers. If it is None, a new `WorkerSlots` is created.
    """

    def __init__(self, slots: WorkerSlots | None = None) -> None:
        self.slots = WorkerSlots() if slots is None else slots
        self._slots: dict[str, int] = {}  # slot of each worker of this index
        self.workers: Workers = 0  # set of the workers of this index
        self._num_blocks: dict[int, int] = {}  # number of blocks of each worker, by slot
        # For each worker, how often blocks were removed; see `num_removals`.
        self._num_removals: Counter[str] = Counter()
        self._tree = RadixTree()  # tree of the reachable blocks
        self._loose = _LooseBlocks()
        # Slots of forgotten workers whose blocks have not all been removed yet.
        self._leaving: dict[str, int] = {}

    def slot(self, worker: str) -> int:
        """Return the slot of a worker; a new worker gets a free slot."""
        slot = self._slots.get(worker)
        if slot is None:
            while worker in self._leaving:
                self.purge()
            slot = self._slots[worker] = self.slots.acquire(worker)
            self.workers |= 1 << slot
            self._num_blocks[slot] = 0
            self._loose.add_worker(slot)
        return slot

    def store(self, worker: str, hashes: Sequence[int], parent: int | None = None) -> None:
        """Add blocks of a worker; blocks that the worker has already are ignored.

        Args:
            worker: name of the worker.
            hashes: the blocks, in any order if there is no `parent`.
            parent: the block before `hashes[0]`, or `START`. With a parent, `hashes` are
                consecutive blocks, so that their positions are known.
        """
        slot = self.slot(worker)
        if parent is not None and (parent == START or self.holders(parent) >> slot & 1):
            self._store_after(slot, hashes, parent)
            return
        nodes, loose = self._tree.nodes, self._loose.of_slot[slot]
        for block in hashes:
            node = nodes.get(block)
            if block not in loose and (node is None or not node.has(slot, block)):
                self._loose.add(slot, block)
                self._num_blocks[slot] += 1

    def _store_after(self, slot: int, hashes: Sequence[int], parent: int) -> None:
        """Add consecutive blocks of a worker that has `parent` and all blocks before it."""
        nodes, loose, start = self._tree.nodes, self._loose.of_slot[slot], 0
        for block in hashes:
            node = nodes.get(block)
            if node is None or not node.has(slot, block):
                break
            parent, start = block, start + 1
        for block in hashes[start:]:
            if block in loose:
                self._loose.remove(block, 1 << slot)
            else:
                self._num_blocks[slot] += 1
        stop = self._tree.extend(hashes, start, parent, [(len(hashes), 1 << slot)])
        for block in hashes[stop:]:
            self._loose.add(slot, block)

    def evict(self, worker: str, hashes: Sequence[int]) -> None:
        """Remove blocks of a worker; blocks that the worker does not have are ignored."""
        slot = self._slots.get(worker)
        if slot is None:
            return
        self._num_removals[worker] += 1
        loose = self._loose.of_slot[slot]
        for block in hashes:
            if block in loose:
                self._loose.remove(block, 1 << slot)
            elif removed := self._tree.evict(slot, block):
                for later in removed[1:]:
                    self._loose.add(slot, later)
            else:
                continue
            self._num_blocks[slot] -= 1

    def clear(self, worker: str) -> None:
        """Remove all blocks of a worker."""
        self.forget(worker)
        while worker in self._leaving:
            self.purge()

    def forget(self, worker: str) -> None:
        """Remove a worker from all results, and remove its first `PURGED_BLOCKS` blocks.

        Removing a million blocks takes half a second. Call `purge` until `is_leaving` is false.
        """
        slot = self._slots.pop(worker, None)
        if slot is None:
            return
        self._num_removals[worker] += 1
        del self._num_blocks[slot]
        self.workers ^= 1 << slot
        self._leaving[worker] = slot
        self.purge()

    def is_leaving(self, worker: str) -> bool:
        """Return whether the index still has blocks of a forgotten worker."""
        return worker in self._leaving

    def purge(self) -> None:
        """Remove up to `PURGED_BLOCKS` blocks of forgotten workers."""
        num_left = PURGED_BLOCKS
        for worker, slot in list(self._leaving.items()):
            num_left = self._loose.purge(slot, self._tree.purge(slot, num_left))
            if num_left <= 0:
                return
            self._loose.remove_worker(slot)
            del self._leaving[worker]
            self.slots.release(worker)

    @property
    def is_empty(self) -> bool:
        """Whether no worker has a block."""
        return not (self._tree.nodes or self._loose.workers)

    def num_blocks(self, worker: str) -> int:
        """Return the number of blocks of a worker."""
        slot = self._slots.get(worker)
        return 0 if slot is None else self._num_blocks[slot]

    def num_removals(self, worker: str) -> int:
        """Return a number that rises whenever blocks of a worker are evicted or forgotten."""
        return self._num_removals[worker]

    def holds(self, worker: str, block: int) -> bool:
        """Return whether a worker has a block, with or without the blocks before it."""
        slot = self._slots.get(worker)
        if slot is None:
            return False
        node = self._tree.nodes.get(block)
        return block in self._loose.of_slot[slot] or (node is not None and node.has(slot, block))

    def holders(self, block: int) -> Workers:
        """Return the workers that are known to have a block and all blocks before it."""
        node = self._tree.nodes.get(block)
        return 0 if node is None else node.holders_of(block) & self.workers

    def match(self, hashes: Sequence[int]) -> Mapping[str, int]:
        """Return how many leading blocks of a prompt each worker has; others are absent.

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
        # One block may be from the middle of a prompt, so it is not moved into the tree.
        if len(hashes) == 1:
            loose = self._loose.workers.get(hashes[0], 0) & self.workers
            holders = self.holders(hashes[0]) | loose
            return [(1, holders)] if holders else []
        levels = self._tree.levels(hashes)
        while self._loose.workers and self._link_loose(hashes, levels):
            levels = self._tree.levels(hashes)
        return self._without_leaving(levels) if self._leaving else levels

    def _without_leaving(self, levels: Sequence[tuple[int, Workers]]) -> list[tuple[int, Workers]]:
        """Return `levels` without the workers whose blocks are being removed."""
        found: list[tuple[int, Workers]] = []
        for depth, workers in levels:
            those = workers & self.workers
            if not those:
                break
            if found and found[-1][1] == those:
                found.pop()
            found.append((depth, those))
        return found

    def _link_loose(self, hashes: Sequence[int], levels: Sequence[tuple[int, Workers]]) -> bool:
        """Add loose blocks that continue the prompt to the tree; return whether there were any."""
        loose, is_changed = self._loose.workers, False
        first = loose.get(hashes[0], 0) if hashes else 0
        starts = [(0, first)] if first else []
        starts += [
            (depth, workers & loose.get(hashes[depth], 0))
            for depth, workers in levels
            if depth < len(hashes)
        ]
        for start, workers in starts:
            ends = self._loose.ends(hashes, start, workers)
            parent = hashes[start - 1] if start else START
            stop = self._tree.extend(hashes, start, parent, ends)
            for end, those in ends:
                self._loose.remove_all(hashes[start : min(end, stop)], those)
            is_changed |= stop > start
        return is_changed


class _LooseBlocks:
    """Blocks whose position is unknown, or whose parent is missing.

    Attributes:
        workers: the workers of each block.
        of_slot: the blocks of each worker, by slot.
    """

    def __init__(self) -> None:
        self.workers: dict[int, Workers] = {}
        self.of_slot: dict[int, set[int]] = {}
        # By slot: the int 1 << slot, kept so that the blocks of a worker can share one object.
        self._bits: dict[int, Workers] = {}

    def add_worker(self, slot: int) -> None:
        self.of_slot[slot] = set()
        self._bits[slot] = 1 << slot

    def add(self, slot: int, block: int) -> None:
        old, bit = self.workers.get(block), self._bits[slot]
        self.workers[block] = bit if old is None else old | bit
        self.of_slot[slot].add(block)

    def remove(self, block: int, bit: Workers) -> None:
        self.remove_all((block,), bit)

    def remove_all(self, blocks: Sequence[int], workers: Workers) -> None:
        """Remove `blocks` of `workers`; each worker must have each block."""
        for block in blocks:
            rest = self.workers[block] ^ workers
            if rest:
                self.workers[block] = rest
            else:
                del self.workers[block]
        for slot in bits(workers):
            self.of_slot[slot].difference_update(blocks)

    def purge(self, slot: int, num_blocks: int) -> int:
        """Remove up to `num_blocks` blocks of a worker; return how many more could be removed."""
        own, bit = self.of_slot[slot], self._bits[slot]
        while own and num_blocks > 0:
            block = own.pop()
            rest = self.workers[block] ^ bit
            if rest:
                self.workers[block] = rest
            else:
                del self.workers[block]
            num_blocks -= 1
        return num_blocks

    def remove_worker(self, slot: int) -> None:
        """Remove a worker that has no blocks."""
        del self.of_slot[slot], self._bits[slot]

    def ends(
        self, hashes: Sequence[int], start: int, workers: Workers
    ) -> list[tuple[int, Workers]]:
        """Return where the consecutive loose blocks of workers end.

        Only workers with a loose block at `start` count.

        Returns:
            Pairs, in ascending order, of the index after the last consecutive loose block, and the
            workers whose blocks end there. Other workers are in no pair.
        """
        found: list[tuple[int, Workers]] = []
        end = start
        while workers:
            those = workers & self.workers.get(hashes[end], 0) if end < len(hashes) else 0
            if those != workers and end > start:
                found.append((end, workers ^ those))
            workers, end = those, end + 1
        return found
