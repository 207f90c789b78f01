"""The pool of KV blocks: reference counts, content hashes and the order of eviction.

A block is held by running sequences (used), by leases, or by a KV transfer that writes the block
(reserved). A block without a holder is cached while it is published under its content hash, and
free otherwise. Cached blocks are evicted in LRU order. Among the blocks of one sequence the last
block is evicted first, so that the remaining prefix can still be matched.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from enum import IntEnum
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.workers.scheduling.block_contents import BlockContents
from penstock.workers.scheduling.sequence import Ints


class State(IntEnum):
    """State of a block; if a block has several kinds of holders, the lowest number applies."""

    USED = 0
    LEASED = 1
    RESERVED = 2
    CACHED = 3
    FREE = 4


# Plain ints, because access to an enum member takes longer than the arithmetic.
_USED, _LEASED, _RESERVED, _CACHED, _FREE = (int(state) for state in State)
_NUM_STATES = len(State)

Hold: TypeAlias = Literal[State.USED, State.LEASED, State.RESERVED]


class BlockChanges:
    """Net changes of the published blocks since this object was made, by hash, in order.

    A block that is published and unpublished again is in neither dict.
    """

    def __init__(self) -> None:
        self.stored: dict[bytes, bytes] = {}  # new block -> block before it, or root
        self.evicted: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self.stored or self.evicted)

    def store(self, digest: bytes, parent: bytes) -> None:
        if digest in self.evicted:
            del self.evicted[digest]
        else:
            self.stored[digest] = parent

    def evict(self, digest: bytes) -> None:
        if digest in self.stored:
            del self.stored[digest]
        else:
            self.evicted[digest] = None


class BlockPool:
    """Reference counts, hashes and LRU order of `num_blocks` blocks; O(1) time per block.

    Methods take blocks as int32 arrays [n] without duplicates, in the order of the sequence.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.state = np.full(num_blocks, State.FREE, np.int8)
        self._counts = [0, 0, 0, 0, num_blocks]  # number of blocks in each state
        self._holders = np.zeros((3, num_blocks), np.int32)  # by kind: USED, LEASED, RESERVED
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # stack of the free blocks
        self._lru: OrderedDict[int, None] = OrderedDict()  # cached blocks, in order of eviction
        self._hashed = np.zeros(num_blocks, np.bool_)
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._contents = BlockContents()
        self.changes: BlockChanges | None = None  # None: changes are not recorded

    def num(self, state: State) -> int:
        return self._counts[state]

    @property
    def num_available(self) -> int:
        """Number of blocks that `take` could return now."""
        return self._counts[_FREE] + self._counts[_CACHED]

    def num_idle(self, blocks: Ints) -> int:
        """Return how many of `blocks` have no holder and therefore count as available."""
        return int(np.count_nonzero(self.state[blocks] >= _CACHED))

    def is_findable(self, blocks: Ints) -> npt.NDArray[np.bool_]:
        """Return a mask [n]: True for published blocks, which `match` may return."""
        return self._hashed[blocks]

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
        self._holders[hold, blocks] = 1
        self.state[blocks] = hold
        self._counts[hold] += num
        self._counts[_FREE] -= from_free
        self._counts[_CACHED] -= num_evicted
        return blocks

    def retain(self, blocks: Ints, hold: Hold) -> None:
        """Add a holder to each block; the blocks must be held or cached."""
        self._holders[hold, blocks] += 1
        self._update_states(blocks[self.state[blocks] > hold])

    def move(self, blocks: Ints, old: Hold, new: Hold) -> None:
        """For each block, turn one holder of kind `old` into one holder of kind `new`."""
        self._holders[old, blocks] -= 1
        self._holders[new, blocks] += 1
        self._update_states(blocks)

    def release(self, blocks: Ints, hold: Hold) -> None:
        """Remove a holder; a block without holders becomes cached if published, otherwise free."""
        left = self._holders[hold, blocks] - 1
        self._holders[hold, blocks] = left
        self._update_states(blocks[left == 0])

    def num_copies(self, blocks: Ints) -> int:
        """Return how many copies these writes need (copy-on-write).

        Args:
            blocks: [n] the block that each writer is about to write; a shared block occurs once per
                writer. If all holders of an unpublished block write, the last writer needs no copy.
        """
        own, writers = np.unique(blocks, return_counts=True)
        sole_holder = (self._holders[:, own].sum(0) == writers) & ~self._hashed[own]
        return int((writers - sole_holder).sum())

    def is_shared(self, block: int) -> bool:
        """Return True if a write needs a copy: the block is published or has several holders."""
        return bool(self._hashed[block] or self._holders[:, block].sum() > 1)

    def match(self, hashes: Sequence[bytes]) -> Ints:
        """Return the blocks of the longest prefix of this hash chain that is published."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return np.array(blocks, np.int32)

    def match_begun(self, parent: bytes, tokens: Ints) -> tuple[Ints, int]:
        """Return the published block that begins with most of `tokens`, and their number.

        Args:
            parent: hash of the last full block of a sequence, or its root.
            tokens: [n] the sequence's next tokens, fewer than a block has.

        Returns:
            [1] the block, or [0] if none begins with the first token; and the number of tokens that
            they have in common.
        """
        digest, length = self._contents.longest_common(parent, tokens)
        return np.array([self._block_of[digest]] if length else [], np.int32), length

    def has_hash(self, digest: bytes) -> bool:
        """Return True if a block is published under this hash."""
        return digest in self._block_of

    def hashes(self) -> Collection[bytes]:
        """Return the hashes of all published blocks."""
        return self._block_of.keys()

    def publish(
        self,
        blocks: Sequence[int],
        hashes: Sequence[bytes],
        parents: Sequence[bytes],
        contents: Sequence[bytes] | None = None,
    ) -> None:
        """Publish used blocks under their hashes; a hash that is known keeps its first block.

        Args:
            blocks: [n] blocks in state USED.
            hashes: [n] hash of each block.
            parents: [n] hash of the block before each block; for the first block of a sequence, the
                sequence's root.
            contents: [n] tokens of each block as bytes of int32; None: `match_begun` finds none of
                these blocks.
        """
        if (self.state[blocks] != _USED).any():
            raise ValueError("only blocks in state USED can be published")
        new = []
        for index, (block, digest) in enumerate(zip(blocks, hashes, strict=True)):
            if digest not in self._block_of and block not in self._hash_of:
                self._block_of[digest] = block
                self._hash_of[block] = digest
                new.append(block)
                if contents is not None:
                    self._contents.add(digest, parents[index], contents[index])
                if self.changes is not None:
                    self.changes.store(digest, parents[index])
        self._hashed[new] = True

    def forget(self, blocks: Ints) -> None:
        """Unpublish blocks whose content may be wrong, so that `match` does not return them."""
        for block in blocks[self._hashed[blocks]].tolist():
            self._unpublish(block)
        self._update_states(blocks)

    def check_total(self) -> None:
        """Raise AssertionError if the block counts do not add up; cheap enough for every step."""
        if sum(self._counts) != self.num_blocks or min(self._counts) < 0:
            raise AssertionError(f"{self._counts} do not add up to {self.num_blocks}")

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
                f"{State(hold).name}: wrong reference counts"
            )
        written = self._holders[State.RESERVED] > 0
        others = self._holders[State.USED] + self._holders[State.LEASED] > 0
        assert not (written & (others | self._hashed)).any(), "a reserved block is readable"
        assert (self.state == self._states(np.arange(self.num_blocks, dtype=np.int32))).all()
        assert self._counts == np.bincount(self.state, minlength=len(State)).tolist()
        free = self._free[: self.num(State.FREE)]
        assert sorted(free.tolist()) == np.flatnonzero(self.state == State.FREE).tolist()
        assert sorted(self._lru) == np.flatnonzero(self.state == State.CACHED).tolist()
        assert self._hash_of == {block: digest for digest, block in self._block_of.items()}
        assert sorted(self._hash_of) == np.flatnonzero(self._hashed).tolist()
        self._contents.check(set(self._block_of))

    def _evict(self) -> int:
        block, _ = self._lru.popitem(last=False)
        self._unpublish(block)
        return block

    def _unpublish(self, block: int) -> None:
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        self._hashed[block] = False
        self._contents.remove(digest)
        if self.changes is not None:
            self.changes.evict(digest)

    def _states(self, blocks: Ints) -> npt.NDArray[np.int8]:
        used, leased, reserved = self._holders[:, blocks] > 0
        states = np.where(self._hashed[blocks], np.int8(_CACHED), np.int8(_FREE))
        states[reserved] = _RESERVED
        states[leased] = _LEASED
        states[used] = _USED
        return states

    def _update_states(self, blocks: Ints) -> None:
        """Update states, counts, free stack and LRU order after a change of holders."""
        if not blocks.size:
            return
        blocks = blocks[::-1]  # so that a block is evicted before the blocks that precede it
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
