"""Radix tree of the blocks that workers have cached together with all blocks before them.

The hash of a block covers all tokens before it, so hashes form trees: each block has one parent. A
node of the radix tree is a run of consecutive blocks. Only the last block of a run may have several
children. Each worker of a node has the run's first blocks, up to some **extent**. Matching a prompt
takes one look-up for each run of blocks.
"""

from collections.abc import Sequence

from penstock.router.routing.prefix_cache.worker_slots import Workers, bits

START = 0
"""The parent of the first block of a prompt. No block has this hash."""


class Node:
    """A run of blocks.

    Attributes:
        blocks: the blocks of the run, at least one.
        size: number of blocks. `size` and `last` repeat data of `blocks` to save cache misses in a
            match.
        last: the last block.
        parent: the node whose last block precedes this run; None if the run begins a prompt.
        children: the nodes after this run; None if there are none.
        holders: workers that have the first block.
        partial: for each extent below `size`, the holders with this extent; None if all holders
            have all blocks.
    """

    __slots__ = ("blocks", "children", "holders", "last", "parent", "partial", "size")

    def __init__(self, blocks: list[int], parent: "Node | None") -> None:
        self.set_blocks(blocks)
        self.parent = parent
        self.children: set[Node] | None = None
        self.holders: Workers = 0
        self.partial: dict[int, Workers] | None = None
        if parent is not None:
            if parent.children is None:
                parent.children = set()
            parent.children.add(self)

    def set_blocks(self, blocks: list[int]) -> None:
        self.blocks = blocks
        self.size = len(blocks)
        self.last = blocks[-1]

    def extent(self, slot: int) -> int:
        """Return the number of blocks of this run that a worker has."""
        if not self.holders >> slot & 1:
            return 0
        if self.partial is not None:
            for extent, workers in self.partial.items():
                if workers >> slot & 1:
                    return extent
        return self.size

    def has(self, slot: int, block: int) -> bool:
        """Return whether a worker has a block of this run."""
        extent = self.extent(slot)
        return extent == self.size or (extent > 0 and self.offset(block, extent - 1) < extent)

    def offset(self, block: int, guess: int) -> int:
        """Return the index of a block in this run.

        A correct guess of the index saves the search.
        """
        return guess if self.blocks[guess] == block else self.blocks.index(block)

    def holders_of(self, block: int) -> Workers:
        """Return the workers that have a block of this run."""
        holders = self.holders
        if self.partial is not None:
            offset = self.offset(block, self.size - 1)
            for extent, workers in self.partial.items():
                if extent <= offset:
                    holders ^= workers
        return holders

    def set_extent(self, workers: Workers, extent: int) -> None:
        """Set the extent (at least 1) of some holders."""
        partial = {
            each: rest for each, those in (self.partial or {}).items() if (rest := those & ~workers)
        }
        if extent < self.size:
            partial[extent] = partial.get(extent, 0) | workers
        self.partial = partial or None

    def add_levels(self, levels: list[tuple[int, Workers]], start: int, end: int) -> Workers:
        """Append the depths at which some workers have no further blocks of this run.

        Args:
            levels: see `RadixTree.levels`.
            start: index of the first block of this run in the prompt.
            end: index in the prompt after the last block that prompt and run have in common.

        Returns:
            The workers that have all blocks before `end`.
        """
        workers = self.holders
        for extent, those in sorted((self.partial or {}).items()):
            if start + extent >= end:
                break
            levels.append((start + extent, workers))
            workers ^= those
        return workers

    def num_common(self, hashes: Sequence[int], start: int, offset: int = 0) -> int:
        """Return how many blocks from `offset` on are equal to the hashes from `start` on.

        The hashes are chained, so no block after the first different one is equal.
        """
        blocks = self.blocks
        shift = start - offset
        low, high = offset, min(self.size, len(hashes) - shift)
        while low < high:
            middle = (low + high) >> 1
            if blocks[middle] == hashes[shift + middle]:
                low = middle + 1
            else:
                high = middle
        return low - offset


class RadixTree:
    """The nodes of the tree, for all prompts."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}  # for each block, the node that contains it
        # For each worker, the nodes in which the worker has blocks.
        self._of_slot: dict[int, set[Node]] = {}

    def levels(self, hashes: Sequence[int]) -> list[tuple[int, Workers]]:
        """Return `PrefixIndex.levels` of the blocks of this tree."""
        levels: list[tuple[int, Workers]] = []
        get, num = self.nodes.get, len(hashes)
        position, workers = 0, 0
        while position < num:
            node = get(hashes[position])
            if node is None:
                break
            end = position + node.size
            if end > num or hashes[end - 1] != node.last:
                end = position + node.num_common(hashes, position)
                if end == position:
                    # The block is inside this run. The prompt could continue here only with the
                    # run's first block.
                    break
            if node.holders != workers:
                if position:
                    levels.append((position, workers))
                workers = node.holders
            if node.partial is not None:
                workers = node.add_levels(levels, position, end)
            if not workers:
                return levels
            position = end
        if workers:
            levels.append((position, workers))
        return levels

    def extend(
        self, hashes: Sequence[int], start: int, parent: int, ends: Sequence[tuple[int, Workers]]
    ) -> int:
        """Add consecutive blocks to workers that have all blocks before them.

        Args:
            hashes: hashes of a prompt.
            start: index of the first block to add.
            parent: the block before `start`, or `START`.
            ends: pairs, in ascending order: index of the first block not to add, and the workers.

        Returns:
            The index of the first block that is not added to any worker. It is smaller than the
            last end only if the blocks contradict the tree.
        """
        before = None if parent == START else self.nodes.get(parent)
        if not ends or (before is None and parent != START):
            return start
        offset = 0 if before is None else before.offset(parent, before.size - 1) + 1
        last = ends[-1][0]
        while start < last:
            node = self.nodes.get(hashes[start])
            if node is None:
                node, offset = self._insert(hashes[start:last], before, offset, ends)
            elif node is not before:
                if node.parent is not before or (before is not None and offset < before.size):
                    return start
                offset = 0
            end = min(start + node.num_common(hashes, start, offset), last)
            if end == start:
                return start
            for stop, workers in ends:
                if stop > start:
                    self._reach(node, workers, offset + min(stop, end) - start)
            before, offset, start = node, offset + end - start, end
        return start

    def evict(self, slot: int, block: int) -> list[int]:
        """Remove a block of a worker, and all blocks after it.

        Returns:
            The removed blocks, `block` first; empty if the worker does not have it in this tree.
        """
        node = self.nodes.get(block)
        extent = 0 if node is None else node.extent(slot)
        if node is None or not extent:
            return []
        kept = node.offset(block, extent - 1)
        if kept >= extent:
            return []
        removed = node.blocks[kept:extent]
        after = [node] if extent == node.size else []
        while after:
            children = after.pop().children or ()
            for child in [each for each in children if each.holders >> slot & 1]:
                extent = child.extent(slot)
                removed += child.blocks[:extent]
                if extent == child.size:
                    after.append(child)
                self._shrink(child, slot, 0)
        self._shrink(node, slot, kept)
        return removed

    def purge(self, slot: int, num_blocks: int) -> int:
        """Remove blocks of a worker, in any order; return how many more could be removed.

        Args:
            slot: the worker. Until it has no blocks, `levels` may be wrong for this worker only.
            num_blocks: maximum number of removed blocks.
        """
        own = self._of_slot.get(slot)
        while own and num_blocks > 0:
            node = own.pop()  # `pop` finds an element faster than an iterator after removals
            own.add(node)
            extent = node.extent(slot)
            self._shrink(node, slot, max(extent - num_blocks, 0))
            num_blocks -= extent
        return num_blocks

    def _insert(
        self,
        blocks: Sequence[int],
        before: Node | None,
        offset: int,
        ends: Sequence[tuple[int, Workers]],
    ) -> tuple[Node, int]:
        """Add blocks to the end of a run, or as a new run; return the node and the blocks' offset.

        A run grows if the workers that have all of its blocks get all of the new blocks. Otherwise
        a new run begins, because these workers would no longer have all blocks of the run.
        """
        if not self.nodes.keys().isdisjoint(blocks):  # a collision of hashes
            blocks = blocks[: next(at for at, block in enumerate(blocks) if block in self.nodes)]
        if before is not None and offset < before.size:
            self._split(before, offset)
        if (
            before is not None
            and before.children is None
            and len(ends) == 1
            and before.holders_of(before.last) == ends[0][1]
        ):
            node = before
            node.set_blocks([*node.blocks, *blocks])
        else:
            node, offset = Node(list(blocks), before), 0
        self.nodes.update(dict.fromkeys(blocks, node))
        return node, offset

    def _split(self, node: Node, size: int) -> None:
        """Move the blocks of a run from index `size` on to a new child."""
        children, partial = node.children, node.partial or {}
        node.children = None
        tail = Node(node.blocks[size:], node)
        tail.children = children
        for child in children or ():
            child.parent = tail
        tail.holders = node.holders_of(tail.blocks[0])
        tail.partial = {at - size: each for at, each in partial.items() if at > size} or None
        node.set_blocks(node.blocks[:size])
        node.partial = {at: each for at, each in partial.items() if at < size} or None
        self.nodes.update(dict.fromkeys(tail.blocks, tail))
        for slot in bits(tail.holders):
            self._of_slot[slot].add(tail)

    def _reach(self, node: Node, workers: Workers, extent: int) -> None:
        """Raise the extents of `workers` to `extent`. The old extents must be smaller."""
        new = workers & ~node.holders
        for slot in bits(new):
            self._of_slot.setdefault(slot, set()).add(node)
        node.holders |= workers
        if extent < node.size or node.partial is not None:
            node.set_extent(workers, extent)

    def _shrink(self, node: Node, slot: int, extent: int) -> None:
        """Lower the extent of a worker; remove the blocks that no worker has any more."""
        bit = 1 << slot
        if extent:
            node.set_extent(bit, extent)
        else:
            node.set_extent(bit, node.size)
            node.holders ^= bit
            own = self._of_slot[slot]
            own.remove(node)
            if not own:
                del self._of_slot[slot]
        if node.holders_of(node.last):
            return
        longest = max(node.partial or (0,))
        for block in node.blocks[longest:]:
            del self.nodes[block]
        if longest:
            # Truncate in place: a run may be evicted block by block, and copies would be slow.
            del node.blocks[longest:]
            node.set_blocks(node.blocks)
            assert node.partial is not None
            node.set_extent(node.partial[longest], longest)
        elif node.parent is not None:
            siblings = node.parent.children
            assert siblings is not None
            siblings.remove(node)
            node.parent.children = siblings or None
