from collections.abc import Mapping, Sequence
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.router.routing.prefix_cache import prefix_index
from penstock.router.routing.prefix_cache.prefix_index import PURGED_BLOCKS, START, PrefixIndex
from penstock.router.routing.prefix_cache.radix_tree import Node
from penstock.router.routing.prefix_cache.worker_slots import WorkerSlots, bits

WORKERS = ["a", "b", "c"]


class WalkedIndex:
    """Reference for `match`: compare the prompt with each worker's blocks one by one."""

    def __init__(self) -> None:
        self.blocks: dict[str, set[int]] = {}

    def match(self, hashes: Sequence[int]) -> Mapping[str, int]:
        depths = {}
        for worker, blocks in self.blocks.items():
            missing = [depth for depth, block in enumerate(hashes) if block not in blocks]
            depths[worker] = missing[0] if missing else len(hashes)
        return {worker: depth for worker, depth in depths.items() if depth}


def path(leaf: int) -> list[int]:
    """Return the blocks from the root to a node of a tree: the parent of n is (n - 1) // 2."""
    nodes = [leaf]
    while nodes[-1] > 0:
        nodes.append((nodes[-1] - 1) // 2)
    return [2**63 + node for node in reversed(nodes)]


nodes = st.integers(0, 62)
workers = st.sampled_from(WORKERS)


class IndexMachine(RuleBasedStateMachine):
    """Stores and evicts blocks of a tree in any order, and compares matches with the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.oracle = PrefixIndex(), WalkedIndex()

    @rule(worker=workers, node=nodes, start=st.integers(0, 5), names_parent=st.booleans())
    def store_run(self, worker: str, node: int, start: int, names_parent: bool) -> None:
        blocks = path(node)
        start = min(start, len(blocks) - 1)
        parent = blocks[start - 1] if start else START
        self.index.store(worker, blocks[start:], parent if names_parent else None)
        self.oracle.blocks.setdefault(worker, set()).update(blocks[start:])

    @rule(worker=workers, some=st.lists(nodes, max_size=6))
    def store_in_any_order(self, worker: str, some: list[int]) -> None:
        blocks = [2**63 + node for node in some]
        self.index.store(worker, blocks)
        self.oracle.blocks.setdefault(worker, set()).update(blocks)

    @rule(worker=workers, some=st.lists(nodes, max_size=6))
    def evict_in_any_order(self, worker: str, some: list[int]) -> None:
        blocks = [2**63 + node for node in some]
        self.index.evict(worker, blocks)
        self.oracle.blocks.get(worker, set()).difference_update(blocks)

    @rule(worker=workers)
    def clear(self, worker: str) -> None:
        self.index.clear(worker)
        self.oracle.blocks.pop(worker, None)

    @rule(worker=workers)
    def forget_and_purge_later(self, worker: str) -> None:
        with mock.patch.object(prefix_index, "PURGED_BLOCKS", 2):
            self.index.forget(worker)
        self.oracle.blocks.pop(worker, None)

    @rule()
    def purge(self) -> None:
        with mock.patch.object(prefix_index, "PURGED_BLOCKS", 2):
            self.index.purge()

    @rule(node=nodes)
    def match_one_prompt(self, node: int) -> None:
        assert self.index.match(path(node)) == self.oracle.match(path(node))

    @rule(worker=workers, node=nodes)
    def ask_for_one_block(self, worker: str, node: int) -> None:
        has_it = 2**63 + node in self.oracle.blocks.get(worker, ())
        assert self.index.holds(worker, 2**63 + node) == has_it
        assert (worker in self.index.match([2**63 + node])) == has_it

    @rule()
    def match_all_prompts(self) -> None:
        for leaf in range(31, 63):
            assert self.index.match(path(leaf)) == self.oracle.match(path(leaf))

    def teardown(self) -> None:
        for worker in WORKERS:
            self.index.clear(worker)
        assert self.index.is_empty
        assert not any((self.index._tree._of_slot, self.index._loose.of_slot, self.index.workers))

    @invariant()
    def numbers_of_blocks_agree(self) -> None:
        for worker in WORKERS:
            blocks = self.oracle.blocks.get(worker, ())
            assert self.index.num_blocks(worker) == len(blocks)


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=70), st.integers(1, 40))
def test_levels_of_prefixes_are_their_distinct_depths(depths: list[int], length: int) -> None:
    """Each worker has one prefix of the prompt. With many workers, masks exceed a machine word."""
    index, prompt = PrefixIndex(), list(range(1, length + 1))
    for number, depth in enumerate(depths):
        index.store(f"w{number}", prompt[:depth], START)
    expected = sorted({min(depth, length) for depth in depths} - {0})
    levels = index.levels(prompt)
    assert [depth for depth, _ in levels] == expected
    for depth, mask in levels:
        assert {index.slot(f"w{n}") for n, d in enumerate(depths) if d >= depth} == set(bits(mask))


def test_an_index_without_blocks_matches_nothing() -> None:
    index = PrefixIndex()
    assert index.match([1, 2]) == {}
    index.store("a", [])
    assert index.match([]) == index.match([1]) == {}


def test_slot_of_a_cleared_worker_is_used_again() -> None:
    index = PrefixIndex()
    index.store("a", [1, 2], START)
    index.clear("a")
    index.store("b", [1], START)
    assert index.match([1, 2]) == {"b": 1}
    assert index.slot("b") == 0


@pytest.mark.parametrize("parent", [START, None])
def test_a_call_removes_a_bounded_number_of_blocks_of_a_forgotten_worker(
    parent: int | None,
) -> None:
    index, num = PrefixIndex(), 3 * PURGED_BLOCKS - 1
    blocks = list(range(1, num + 1))
    index.store("a", blocks, parent)
    index.store("b", blocks[:10], START)
    index.forget("a")
    for removed in (1, 2):
        assert index.is_leaving("a")
        assert len(index._tree.nodes) + len(index._loose.workers) >= num - removed * PURGED_BLOCKS
        assert index.match(blocks) == {"b": 10}
        assert index.num_blocks("a") == 0
        index.purge()
    assert not index.is_leaving("a")
    assert len(index._tree.nodes) + len(index._loose.workers) == 10


@pytest.mark.parametrize("parent", [START, None])
def test_removed_blocks_take_no_memory(parent: int | None) -> None:
    index = PrefixIndex()
    for number in range(200):  # 200 short continuations of one block
        index.store("a", [1, 10 + number], parent)
        index.match([1, 10 + number])
        index.evict("a", [10 + number])
    index.evict("a", [1])
    tables = (index._loose.workers, index._loose.of_slot[index.slot("a")])
    assert not any((index._tree.nodes, index._tree._of_slot, *tables))


class CountingDict(dict[int, Node]):
    """A dict that counts its look-ups."""

    num_lookups = 0

    def get(self, key: int, default: Node | None = None) -> Node | None:  # type: ignore[override]
        self.num_lookups += 1
        return super().get(key, default)


def test_a_match_looks_up_one_block_of_each_run() -> None:
    index, prompt = PrefixIndex(), list(range(1, 751))
    for number, depth in enumerate((1, 100, 500, 750)):
        index.store(f"w{number}", prompt[:depth], START)
    table = index._tree.nodes = CountingDict(index._tree.nodes)
    assert index.match(prompt) == {"w0": 1, "w1": 100, "w2": 500, "w3": 750}
    assert table.num_lookups == 4
    assert index.match([*prompt, 751]) == {"w0": 1, "w1": 100, "w2": 500, "w3": 750}
    assert table.num_lookups == 9


def test_slot_is_free_again_when_all_indexes_have_released_it() -> None:
    slots = WorkerSlots()
    first, second = PrefixIndex(slots), PrefixIndex(slots)
    first.store("a", [1], START)
    second.store("b", [1], START)
    second.store("a", [2], START)
    assert first.levels([1]) == [(1, 1 << slots.acquire("a"))]
    slots.release("a")
    first.clear("a")
    assert slots.names == ["a", "b"]
    assert second.match([1]) == {"b": 1}
    version = slots.version
    second.clear("a")
    assert slots.names == ["", "b"]
    assert slots.version > version
    first.store("c", [7], START)
    assert slots.names == ["c", "b"]
    assert first.match([7]) == {"c": 1}
    assert second.match([1]) == {"b": 1}
