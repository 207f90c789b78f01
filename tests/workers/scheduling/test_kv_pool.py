"""BlockPool: order of eviction, and block counts after operations in any order."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.common.block_hash import block_hash, root_hash
from penstock.workers.scheduling.kv_pool import BlockPool, Hold, State
from penstock.workers.scheduling.sequence import Ints

KEY = bytes(range(32))


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


def chain(*names: int, salt: bytes = b"") -> list[bytes]:
    hashes = [root_hash(KEY, salt)]
    for name in names:
        hashes.append(block_hash(hashes[-1], ints(name, name + 1)))
    return hashes[1:]


def publish(pool: BlockPool, blocks: Ints, hashes: list[bytes]) -> None:
    pool.publish(blocks.tolist(), hashes, [b"", *hashes[:-1]])


def test_released_blocks_are_cached_until_they_are_taken_again() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3, State.USED)
    publish(pool, blocks[:2], chain(1, 2))
    pool.release(blocks, State.USED)
    assert (pool.num(State.CACHED), pool.num(State.FREE)) == (2, 2)
    assert pool.published.match(chain(1, 2, 3)).tolist() == blocks[:2].tolist()
    assert pool.published.match(chain(5)).size == 0
    pool.retain(pool.published.match(chain(1)), State.USED)
    assert pool.num_available == 3
    pool.take(3, State.USED)
    assert pool.published.match(chain(1, 2)).tolist() == blocks[:1].tolist()


def test_last_block_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(6)
    first, second = pool.take(3, State.USED), pool.take(3, State.USED)
    publish(pool, first, chain(1, 2, 3))
    publish(pool, second, chain(4, 5, 6))
    pool.release(first, State.USED)
    pool.release(second, State.USED)
    pool.retain(first[:1], State.USED)  # now this block is the most recently used one
    pool.release(first[:1], State.USED)
    order = [int(pool.take(1, State.USED)[0]) for _ in range(6)]
    assert order == [*first[:0:-1].tolist(), *second[::-1].tolist(), int(first[0])]


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(2)
    blocks = pool.take(2, State.USED)
    publish(pool, blocks[:1], chain(1))
    pool.release(blocks, State.USED)
    assert pool.take(1, State.USED).tolist() == blocks[1:].tolist()


def test_repeated_content_keeps_its_first_block() -> None:
    pool = BlockPool(2)
    blocks = pool.take(2, State.USED)
    publish(pool, blocks, chain(1) * 2)
    assert pool.published.match(chain(1)).tolist() == blocks[:1].tolist()
    pool.release(blocks, State.USED)
    assert (pool.num(State.CACHED), pool.num(State.FREE)) == (1, 1)


def test_reserved_blocks_cannot_be_published() -> None:
    pool = BlockPool(1)
    blocks = pool.take(1, State.RESERVED)
    with pytest.raises(ValueError, match="can be published"):
        publish(pool, blocks, chain(1))


def test_shared_block_is_counted_once_as_used_before_leased() -> None:
    pool = BlockPool(1)
    block = pool.take(1, State.USED)
    publish(pool, block, chain(1))
    pool.retain(block, State.LEASED)
    assert pool.num(State.USED) == 1
    pool.release(block, State.USED)
    assert pool.num(State.LEASED) == 1
    pool.release(block, State.LEASED)
    assert pool.num(State.CACHED) == 1
    pool.forget(block)
    assert pool.num(State.FREE) == 1
    assert pool.published.match(chain(1)).size == 0


def test_check_detects_wrong_block_counts() -> None:
    pool = BlockPool(2)
    block = pool.take(1, State.USED)
    pool.check([block], [], [])
    with pytest.raises(AssertionError, match="USED"):
        pool.check([], [], [])
    with pytest.raises(AssertionError, match="LEASED"):
        pool.check([block], [block], [])


@dataclass(eq=False)
class Held:
    """A holder's blocks in order, and the names of the published blocks among them."""

    hold: Hold
    blocks: Ints
    names: list[int] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, move and release blocks; the pool must agree with plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10)
        self.held: list[Held] = []
        # For each published block, the names of all blocks up to this block.
        self.content: dict[int, tuple[int, ...]] = {}

    def pick(self, data: st.DataObject, *holds: Hold) -> Held | None:
        among = [held for held in self.held if held.hold in holds]
        return data.draw(st.sampled_from(among)) if among else None

    def forget_content(self, blocks: Ints) -> None:
        for block in blocks.tolist():
            self.content.pop(block, None)

    @precondition(lambda self: self.pool.num_available)
    @rule(data=st.data(), hold=st.sampled_from([State.USED, State.RESERVED]))
    def take(self, data: st.DataObject, hold: Hold) -> None:
        num = data.draw(st.integers(1, self.pool.num_available))
        cached = np.flatnonzero(self.pool.state == State.CACHED)
        blocks = self.pool.take(num, hold)
        assert len(set(blocks.tolist())) == num
        held_blocks = {block for held in self.held for block in held.blocks.tolist()}
        assert not held_blocks & set(blocks.tolist())
        if len(cached):
            evicts_none = num <= self.pool.num_blocks - len(held_blocks) - len(cached)
            assert not evicts_none or not set(cached.tolist()) & set(blocks.tolist())
        self.forget_content(blocks)
        self.held.append(Held(hold, blocks))

    @rule(data=st.data(), name=st.integers(0, 2))
    def publish(self, data: st.DataObject, name: int) -> None:
        held = self.pick(data, State.USED)
        if held is None or len(held.names) == len(held.blocks):
            return
        block = int(held.blocks[len(held.names)])
        held.names.append(name)
        known = self.pool.published.match(chain(*held.names)).size == len(held.names)
        hashes = chain(*held.names)
        self.pool.publish([block], hashes[-1:], hashes[-2:-1] or [b""])
        if not known and block not in self.content:
            self.content[block] = tuple(held.names)

    @rule(data=st.data(), names=st.lists(st.integers(0, 2), max_size=4))
    def match(self, data: st.DataObject, names: list[int]) -> None:
        found = self.pool.published.match(chain(*names))
        for depth, block in enumerate(found.tolist(), start=1):
            assert self.content[block] == tuple(names[:depth])
        published = set(self.content.values())
        assert len(found) == len(names) or tuple(names[: len(found) + 1]) not in published
        if found.size:
            self.pool.retain(found, State.USED)
            self.held.append(Held(State.USED, found, names[: len(found)]))

    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        held = self.pick(data, State.USED)
        if held is not None:
            self.pool.move(held.blocks, State.USED, State.LEASED)
            held.hold = State.LEASED

    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        held = self.pick(data, State.RESERVED)
        if held is not None:
            self.pool.move(held.blocks, State.RESERVED, State.USED)
            held.hold = State.USED

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = self.pick(data, State.USED, State.LEASED, State.RESERVED)
        if held is not None:
            self.held.remove(held)
            self.pool.release(held.blocks, held.hold)

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        held = self.pick(data, State.USED)
        if held is not None:
            self.pool.forget(held.blocks)
            self.forget_content(held.blocks)

    @invariant()
    def block_counts_match(self) -> None:
        def blocks(hold: Hold) -> list[Ints]:
            return [held.blocks for held in self.held if held.hold == hold]

        self.pool.check(blocks(State.USED), blocks(State.LEASED), blocks(State.RESERVED))
        assert sum(self.pool.num(state) for state in State) == self.pool.num_blocks
        held = {block for held in self.held for block in held.blocks.tolist()}
        assert self.pool.num(State.CACHED) == len(set(self.content) - held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
