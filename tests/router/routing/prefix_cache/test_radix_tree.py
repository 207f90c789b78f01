"""The radix tree with many workers and long prompts, compared with a plain search."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.router.routing.prefix_cache.prefix_index import START, PrefixIndex
from penstock.router.routing.prefix_cache.radix_tree import Node, RadixTree
from penstock.router.routing.prefix_cache.worker_slots import bits

LENGTH = 24


def prompt_of(forks: dict[int, int]) -> list[int]:
    """Return the blocks of a prompt that leaves branch 0 at each depth in `forks`."""
    branch = 1
    blocks = []
    for depth in range(LENGTH):
        branch = 3 * branch + forks.get(depth, 0)
        blocks.append(2**62 + branch)
    return blocks


FORKS: list[dict[int, int]] = [
    *({}, {0: 1}, {1: 1}, {5: 1}, {23: 1}),
    *({12: 1}, {12: 2}, {12: 1, 13: 1}, {12: 1, 20: 1}, {12: 1, 20: 2}, {5: 1, 12: 1}),
]
PROMPTS = [prompt_of(forks) for forks in FORKS]
names = st.sampled_from([f"w{number:02}" for number in range(70)])
few_names = st.sampled_from(["w00", "w35", "w69"]) | names
prompts = st.sampled_from(PROMPTS)
lengths = st.integers(0, LENGTH)


def check(tree: RadixTree) -> None:
    """Assert that the tree's nodes, blocks, children and workers are consistent."""
    nodes = set(tree.nodes.values())
    assert sorted(tree.nodes) == sorted(block for node in nodes for block in node.blocks)
    for node in nodes:
        assert all(tree.nodes[block] is node for block in node.blocks)
        assert (node.size, node.last) == (len(node.blocks), node.blocks[-1])
        partial = node.partial or {}
        assert node.partial is None or partial
        assert all(0 < extent < node.size and workers for extent, workers in partial.items())
        assert sum(each.bit_count() for each in partial.values()) < node.holders.bit_count()
        full = node.holders_of(node.last)
        assert node.children is None or node.children
        for child in node.children or ():
            assert child.parent is node
            assert child in nodes
            assert child.holders & ~full == 0
        assert node.parent is None or node in (node.parent.children or ())
        for slot in bits(node.holders):
            assert node in tree._of_slot[slot]
    for slot, own in tree._of_slot.items():
        assert own
        assert all(node in nodes and node.holders >> slot & 1 for node in own)


class TreeMachine(RuleBasedStateMachine):
    """Stores and evicts parts of prompts in many orders."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.blocks: dict[str, set[int]] = {}

    @rule(name=few_names, prompt=prompts, start=lengths, end=lengths, has_parent=st.booleans())
    def store(self, name: str, prompt: list[int], start: int, end: int, has_parent: bool) -> None:
        parent = prompt[start - 1] if start else START
        self.index.store(name, prompt[start:end], parent if has_parent else None)
        self.blocks.setdefault(name, set()).update(prompt[start:end])

    @rule(prompt=prompts, some=st.dictionaries(names, lengths, max_size=70))
    def store_at_many_workers(self, prompt: list[int], some: dict[str, int]) -> None:
        for name, end in some.items():
            self.store(name, prompt, 0, end, True)

    @rule(names=st.sets(names, max_size=70), prompt=prompts)
    def receive_snapshots(self, names: set[str], prompt: list[int]) -> None:
        for name in sorted(names):
            self.index.clear(name)
            self.index.store(name, prompt[::-1])
            self.blocks[name] = set(prompt)

    @rule(name=few_names, prompt=prompts, count=lengths)
    def evict_the_last_blocks(self, name: str, prompt: list[int], count: int) -> None:
        held = [block for block in prompt if block in self.blocks.get(name, ())]
        for block in held[::-1][:count]:
            self.index.evict(name, [block])
            self.blocks[name].remove(block)

    @rule(name=few_names, prompt=prompts, some=st.lists(st.integers(0, LENGTH - 1), max_size=4))
    def evict_some_blocks(self, name: str, prompt: list[int], some: list[int]) -> None:
        blocks = [prompt[number] for number in some]
        self.index.evict(name, blocks)
        self.blocks.get(name, set()).difference_update(blocks)

    @rule(name=few_names)
    def clear(self, name: str) -> None:
        self.index.clear(name)
        self.blocks.pop(name, None)

    @rule(prompt=prompts, length=lengths)
    def match(self, prompt: list[int], length: int) -> None:
        prompt = prompt[:length]
        expected = {}
        for name, blocks in self.blocks.items():
            missing = [depth for depth, block in enumerate(prompt) if block not in blocks]
            if depth := missing[0] if missing else length:
                expected[name] = depth
        assert self.index.match(prompt) == expected
        levels = self.index.levels(prompt)
        for (low, many), (high, fewer) in pairwise(levels):
            assert low < high
            assert fewer & ~many == 0 != many & ~fewer

    @invariant()
    def the_tree_is_consistent(self) -> None:
        check(self.index._tree)
        for name, blocks in self.blocks.items():
            assert self.index.num_blocks(name) == len(blocks)
            assert all(self.index.holds(name, block) for block in blocks)


TestTree = TreeMachine.TestCase
TestTree.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


@given(st.lists(lengths, min_size=1, max_size=40), lengths)
def test_workers_of_equal_extent_take_one_entry(extents: list[int], length: int) -> None:
    """All workers that hold the same number of leading blocks of a run share one entry."""
    index, prompt = PrefixIndex(), PROMPTS[0]
    index.store("all", prompt, START)
    for number, extent in enumerate(extents):
        index.store(f"w{number}", prompt[:extent], START)
    nodes: set[Node] = set(index._tree.nodes.values())
    assert sum(len(node.partial or ()) for node in nodes) < len({0, LENGTH, *extents})
    assert index.match(prompt[:length]).get("all", 0) == length


def test_run_with_children_does_not_grow() -> None:
    index = PrefixIndex()
    for prompt in ([1, 2, 3], [1, 2, 4], [1, 2, 5]):
        index.store("a", prompt, START)
    check(index._tree)
    index.store("b", [1, 2, 3], START)
    assert index.match([1, 2, 3]) == {"a": 3, "b": 3}


def test_blocks_that_contradict_the_tree_stay_loose() -> None:
    """Equal short hashes of two blocks must not link a prompt to the blocks of another prompt."""
    index = PrefixIndex()
    index.store("a", [1, 2, 3], START)
    index.store("b", [7, 2, 9], START)
    assert index.match([7, 2, 9]) == {"b": 1}
    assert index.num_blocks("b") == 3
    index.evict("b", [2, 9, 7])
    index.evict("a", [3])
    assert index.match([1, 2, 3]) == {"a": 2}
    assert index.num_blocks("b") == 0
    check(index._tree)
