"""The pool of KV blocks: who holds each, what it is known to contain, which one is given out next.

A block is held by running sequences (used), by leases, or by a transfer that writes it (reserved).
One that nobody holds is cached while it is published under its content's hash, and free otherwise.
Cached blocks are given out again least recently used first, a sequence's deepest block before its
parents, so that what remains of a prefix can still be reached.
"""

from collections import OrderedDict
from collections.abc import Sequence
from enum import IntEnum
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.workers.scheduling.sequence import Ints


class State(IntEnum):
    """What a block counts as; the lower number wins where several hold it."""

    USED = 0
    LEASED = 1
    RESERVED = 2
    CACHED = 3
    FREE = 4


# Looking a member up costs more than the arithmetic that is done with it.
_USED, _LEASED, _RESERVED, _CACHED, _FREE = (int(state) for state in State)
_NUM_STATES = len(State)

Hold: TypeAlias = Literal[State.USED, State.LEASED, State.RESERVED]


class BlockPool:
    """Counts and files `num_blocks` blocks; every verb costs O(1) a block.

    Blocks are passed as int32 arrays [n] without repetition, in the order of the sequence.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.state = np.full(num_blocks, State.FREE, np.int8)
        self._counts = [0, 0, 0, 0, num_blocks]  # by state
        self._holders = np.zeros((3, num_blocks), np.int32)  # a row each for USED, LEASED, RESERVED
        self._free = np.arange(num_blocks - 1, -1, -1, dtype=np.int32)  # a stack: [0, num free)
        self._lru: OrderedDict[int, None] = OrderedDict()  # the cached blocks, next to go first
        self._hashed = np.zeros(num_blocks, np.bool_)
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    def num(self, state: State) -> int:
        return self._counts[state]

    @property
    def num_available(self) -> int:
        """Blocks that `take` could give now."""
        return self._counts[_FREE] + self._counts[_CACHED]

    def num_idle(self, blocks: Ints) -> int:
        """How many of these would no longer be available once somebody holds them."""
        return int(np.count_nonzero(self.state[blocks] >= _CACHED))

    def is_findable(self, blocks: Ints) -> npt.NDArray[np.bool_]:
        """Which of these `match` may give to somebody else."""
        return self._hashed[blocks]

    def take(self, num: int, hold: Hold) -> Ints:
        """`num` <= `num_available` blocks of undefined content, held once."""
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
        """One holder more; for blocks that are held or cached."""
        self._holders[hold, blocks] += 1
        self._update_states(blocks[self.state[blocks] > hold])

    def move(self, blocks: Ints, old: Hold, new: Hold) -> None:
        """A holder of one kind becomes one of another."""
        self._holders[old, blocks] -= 1
        self._holders[new, blocks] += 1
        self._update_states(blocks)

    def release(self, blocks: Ints, hold: Hold) -> None:
        """One holder less; the last one's blocks become cached (if published) or free."""
        left = self._holders[hold, blocks] - 1
        self._holders[hold, blocks] = left
        self._update_states(blocks[left == 0])

    def num_copies(self, blocks: Ints) -> int:
        """How many of these holders, who are to write their block [n] in place, need a copy first.

        A block may stand here once a holder. The last of its holders writes it in place, unless
        others may find it by its content.
        """
        own, writers = np.unique(blocks, return_counts=True)
        sole_holder = (self._holders[:, own].sum(0) == writers) & ~self._hashed[own]
        return int((writers - sole_holder).sum())

    def is_shared(self, block: int) -> bool:
        """Whether it may not be written in place: somebody else holds it or may find it."""
        return bool(self._hashed[block] or self._holders[:, block].sum() > 1)

    def match(self, hashes: Sequence[bytes]) -> Ints:
        """The published blocks of the longest known prefix of this chain."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return np.array(blocks, np.int32)

    def has_hash(self, digest: bytes) -> bool:
        """Whether a block is published under it."""
        return digest in self._block_of

    def publish(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Make used blocks findable; where a content is known already its first block stays."""
        if (self.state[blocks] != _USED).any():
            raise ValueError("only blocks that somebody uses can be published")
        new = []
        for block, digest in zip(blocks, hashes, strict=True):
            if digest not in self._block_of and block not in self._hash_of:
                self._block_of[digest] = block
                self._hash_of[block] = digest
                new.append(block)
        self._hashed[new] = True

    def forget(self, blocks: Ints) -> None:
        """What these hold is not to be trusted: nobody new may find them."""
        for block in blocks[self._hashed[blocks]].tolist():
            self._unpublish(block)
        self._update_states(blocks)

    def check_total(self) -> None:
        """AssertionError if blocks were lost or made: cheap enough for every step."""
        if sum(self._counts) != self.num_blocks or min(self._counts) < 0:
            raise AssertionError(f"{self._counts} are not {self.num_blocks} blocks")

    def check(self, used: list[Ints], leased: list[Ints], reserved: list[Ints]) -> None:
        """AssertionError if the ledger does not balance; every holder's blocks are given."""
        for hold, arrays in enumerate((used, leased, reserved)):
            blocks = np.concatenate([np.zeros(0, np.int32), *arrays])
            holders = np.bincount(blocks, minlength=self.num_blocks)
            assert (holders == self._holders[hold]).all(), f"{State(hold).name}: by whom?"
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

    def _evict(self) -> int:
        block, _ = self._lru.popitem(last=False)
        self._unpublish(block)
        return block

    def _unpublish(self, block: int) -> None:
        del self._block_of[self._hash_of.pop(block)]
        self._hashed[block] = False

    def _states(self, blocks: Ints) -> npt.NDArray[np.int8]:
        used, leased, reserved = self._holders[:, blocks] > 0
        states = np.where(self._hashed[blocks], np.int8(_CACHED), np.int8(_FREE))
        states[reserved] = _RESERVED
        states[leased] = _LEASED
        states[used] = _USED
        return states

    def _update_states(self, blocks: Ints) -> None:
        """Bring state, counts, free stack and LRU order up to date with the holders."""
        if not blocks.size:
            return
        blocks = blocks[::-1]  # tail first: the deepest go first
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
