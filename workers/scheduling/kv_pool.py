"""The pool of KV blocks: reference counts, content hashes and the order of eviction.

A block is held by running sequences (used), by leases, or by a KV transfer that writes the block
(reserved). A block without a holder is cached while it is published under its content hash, and
free otherwise. Cached blocks are evicted in LRU order. Among the blocks of one sequence the last
block is evicted first, so that the remaining prefix can still be matched.
"""

from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.workers.scheduling.published_blocks import PublishedBlocks
from penstock.workers.scheduling.sequence import Ints


class State(IntEnum):
    """State of a block.

    If a block has holders of several kinds, its state is the kind with the lowest number.
    """

    USED = 0
    LEASED = 1
    RESERVED = 2
    CACHED = 3
    FREE = 4


# Plain ints, because access to an enum member takes longer than the arithmetic.
_USED, _LEASED, _RESERVED, _CACHED, _FREE = (int(state) for state in State)
_NUM_STATES = len(State)

Hold: TypeAlias = Literal[State.USED, State.LEASED, State.RESERVED]


class BlockPool:
    """Reference counts, published hashes and LRU order of `num_blocks` blocks; O(1) time per block.

    Methods take blocks as int32 arrays [n] without duplicates, in the order of the sequence.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.state = np.full(num_blocks, State.FREE, np.int8)
        self._counts = [0, 0, 0, 0, num_blocks]  # number of blocks in each state
        # number of holders of each kind (USED, LEASED, RESERVED) of each block
        self._holders = np.zeros((3, num_blocks), np.int32)
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # stack of the free blocks
        self._lru: OrderedDict[int, None] = OrderedDict()  # cached blocks, in order of eviction
        self.published = PublishedBlocks(num_blocks)

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of blocks in each state, in the order of `State`."""
        return tuple(self._counts)

    def num(self, state: State) -> int:
        return self._counts[state]

    @property
    def num_available(self) -> int:
        """Number of blocks that `take` could return now."""
        return self._counts[_FREE] + self._counts[_CACHED]

    def num_idle(self, blocks: Ints) -> int:
        """Return how many of `blocks` have no holder; such blocks count as available."""
        return int(np.count_nonzero(self.state[blocks] >= _CACHED))

    def is_findable(self, blocks: Ints) -> npt.NDArray[np.bool_]:
        """Return a mask [n]: True for published blocks, which a look-up may return."""
        return self.published.mask[blocks]

    def take(self, num: int, hold: Hold) -> Ints:
        """Take `num` blocks of undefined content; each gets one holder.

        `num` is at most `num_available`.
        """
        num_free = self._counts[_FREE]
        from_free = min(num, num_free)
        blocks = self._free[num_free - from_free : num_free].copy()
        num_evicted = num - from_free
        if num_evicted:
            evicted = np.array([self._evict() for _ in range(num_evicted)], np.int32)
            blocks = np.concatenate((blocks, evicted))
        kind = int(hold)  # numpy converts an enum member slowly
        self._holders[kind][blocks] = 1
        self.state[blocks] = kind
        self._counts[kind] += num
        self._counts[_FREE] -= from_free
        self._counts[_CACHED] -= num_evicted
        return blocks

    def retain(self, blocks: Ints, hold: Hold) -> None:
        """Add a holder to each block; the blocks must be held or cached."""
        kind = int(hold)
        self._holders[kind][blocks] += 1
        self._update_states(blocks[self.state[blocks] > kind])

    def move(self, blocks: Ints, old: Hold, new: Hold) -> None:
        """For each block, turn one holder of kind `old` into one holder of kind `new`."""
        self._holders[old, blocks] -= 1
        self._holders[new, blocks] += 1
        self._update_states(blocks)

    def release(self, blocks: Ints, hold: Hold) -> None:
        """Remove a holder; a block without holders becomes cached if published, otherwise free."""
        holders = self._holders[int(hold)]
        left = holders[blocks] - 1
        holders[blocks] = left
        self._update_states(blocks[left == 0])

    def num_copies(self, blocks: Ints) -> int:
        """Return how many blocks must be copied before rows write to `blocks` (copy-on-write).

        If all holders of an unpublished block write, the last one writes to the block itself and
        needs no copy.

        Args:
            blocks: [n] the block to which each writing row is about to write; a shared block occurs
                once per row.
        """
        own, writers = np.unique(blocks, return_counts=True)
        sole_holder = (self._holders[:, own].sum(0) == writers) & ~self.published.mask[own]
        return int((writers - sole_holder).sum())

    def is_shared(self, block: int) -> bool:
        """Return True if a write needs a copy: the block is published or has several holders."""
        return bool(self.published.mask[block] or self._holders[:, block].sum() > 1)

    def publish(
        self,
        blocks: Sequence[int],
        hashes: Sequence[bytes],
        parents: Sequence[bytes],
        contents: Sequence[bytes] | None = None,
    ) -> None:
        """Publish used blocks under their hashes; skip hashes that are published already.

        Args:
            blocks: [n] blocks in state USED.
            hashes: [n] hash of each block.
            parents: [n] hash of the block before each block; for the first block of a sequence, the
                sequence's root.
            contents: [n] tokens of each block as bytes of int32. If None, `match_begun` finds none
                of these blocks.
        """
        if (self.state[blocks] != _USED).any():
            raise ValueError(
                f"at least one of the blocks {blocks!s:.80} is not in state USED: only blocks in "
                "this state can be published"
            )
        for index, (block, digest) in enumerate(zip(blocks, hashes, strict=True)):
            tokens = None if contents is None else contents[index]
            if tokens is not None:
                self._forget_contained(parents[index], tokens)
            self.published.add(block, digest, parents[index], tokens)

    def publish_partial(self, block: int, parent: bytes, tokens: Ints) -> None:
        """Publish a used block that is filled only partly; see `PublishedBlocks.add_partial`."""
        if self.state[block] != _USED:
            raise ValueError(
                f"block {block} is not in state USED: only blocks in this state can be published"
            )
        self._forget_contained(parent, tokens.tobytes())
        self.published.add_partial(block, parent, tokens)

    def forget(self, blocks: Ints) -> None:
        """Unpublish blocks whose content may be wrong, so that `match` does not return them."""
        for block in blocks[self.published.mask[blocks]].tolist():
            self.published.remove(block)
        self._update_states(blocks)

    def check_total(self) -> None:
        """Raise AssertionError if the block counts do not add up; cheap enough for every step."""
        if sum(self._counts) != self.num_blocks or min(self._counts) < 0:
            raise AssertionError(
                f"the counts of blocks by state, {self._counts}, must be at least 0 and add up to "
                f"{self.num_blocks}"
            )

    def check(self, used: list[Ints], leased: list[Ints], reserved: list[Ints]) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent.

        Args:
            used: one array of blocks per sequence that holds any blocks.
            leased: one array of blocks per lease.
            reserved: one array of blocks per KV transfer that writes them.
        """
        for hold, arrays in enumerate((used, leased, reserved)):
            blocks = np.concatenate([np.zeros(0, np.int32), *arrays])
            holders = np.bincount(blocks, minlength=self.num_blocks)
            assert (holders == self._holders[hold]).all(), (
                f"the pool's reference counts for state {State(hold).name} differ from the number "
                "of holders of each block"
            )
        written = self._holders[State.RESERVED] > 0
        others = self._holders[State.USED] + self._holders[State.LEASED] > 0
        assert not (written & (others | self.published.mask)).any(), (
            "a block that is reserved for a KV transfer is also used, leased or published"
        )
        assert (self.state == self._states(np.arange(self.num_blocks, dtype=np.int32))).all()
        assert self._counts == np.bincount(self.state, minlength=len(State)).tolist()
        free = self._free[: self.num(State.FREE)]
        assert sorted(free.tolist()) == np.flatnonzero(self.state == State.FREE).tolist()
        assert sorted(self._lru) == np.flatnonzero(self.state == State.CACHED).tolist()
        self.published.check()

    def _forget_contained(self, parent: bytes, contents: bytes) -> None:
        """Unpublish partly filled blocks after `parent` whose tokens are a prefix of `contents`."""
        contained = self.published.contained(parent, contents)
        if contained:
            self.forget(np.array(contained, np.int32))

    def _evict(self) -> int:
        block, _ = self._lru.popitem(last=False)
        self.published.remove(block)
        return block

    def _states(self, blocks: Ints) -> npt.NDArray[np.int8]:
        used, leased, reserved = self._holders[:, blocks] > 0
        states = np.where(self.published.mask[blocks], np.int8(_CACHED), np.int8(_FREE))
        states[reserved] = _RESERVED
        states[leased] = _LEASED
        states[used] = _USED
        return states

    def _update_states(self, blocks: Ints) -> None:
        """Update states, counts, free stack and LRU order after a change of holders."""
        if not blocks.size:
            return
        blocks = blocks[::-1]  # reverse the order: a block is evicted before its predecessors
        old, new = self.state[blocks], self._states(blocks)
        self.state[blocks] = new
        was_cached, is_cached = old == _CACHED, new == _CACHED
        for block in blocks[was_cached & ~is_cached].tolist():
            del self._lru[block]
        for block in blocks[is_cached & ~was_cached].tolist():
            self._lru[block] = None
        freed = blocks[(old != _FREE) & (new == _FREE)]
        num_free = self._counts[_FREE]
        self._free[num_free : num_free + freed.size] = freed
        more = np.bincount(new, minlength=_NUM_STATES) - np.bincount(old, minlength=_NUM_STATES)
        self._counts = [
            num + change for num, change in zip(self._counts, more.tolist(), strict=True)
        ]
