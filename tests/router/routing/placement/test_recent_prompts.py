from collections.abc import Mapping, Sequence

from hypothesis import given
from hypothesis import strategies as st

from penstock.router.routing.placement.cached_prefix import CachedPrefix, merge_levels
from penstock.router.routing.placement.recent_prompts import (
    KEPT_SECONDS,
    MAX_EXPIRED,
    STRIDE,
    RecentPrompts,
)
from penstock.router.routing.prefix_cache.prefix_index import START, PrefixIndex
from penstock.router.routing.prefix_cache.worker_slots import WorkerSlots


def chain(fork: int, length: int, branch: int) -> list[int]:
    """Return the block hashes of a prompt; the first `fork` hashes are equal in all branches."""
    own = 10_000 * (10 * fork + branch)
    # The hash 0 is reserved for `START`.
    return [*range(1, fork + 1), *range(own + fork, own + length)][:length]


prompts = st.builds(chain, st.integers(0, 60), st.integers(0, 90), st.integers(1, 3))


def match(recent: RecentPrompts, prompt: Sequence[int]) -> Mapping[str, int]:
    return CachedPrefix(recent.index.slots, recent.levels(prompt)).as_dict()


def shared(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = zip(one, other, strict=False)
    return next((depth for depth, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(st.lists(st.tuples(st.sampled_from("ab"), prompts), max_size=6), prompts)
def test_depths_are_at_most_a_stride_too_small(
    placed: list[tuple[str, list[int]]], prompt: list[int]
) -> None:
    recent = RecentPrompts(WorkerSlots())
    for request, (worker, blocks) in enumerate(placed):
        recent.add(request, worker, blocks)
    found = match(recent, prompt)
    for worker in "ab":
        depths = [shared(prompt, blocks) for name, blocks in placed if name == worker]
        depth = max(depths, default=0)
        assert depth - STRIDE < found.get(worker, 0) <= depth
        assert depth > STRIDE or found.get(worker, 0) == depth
    for request in range(len(placed)):
        recent.remove(request)
    assert recent.index.is_empty
    assert not any((recent._counts, recent.index._slots))
    assert len(recent) == 0


def test_record_is_kept_for_a_while_after_its_prompt_is_computed() -> None:
    recent, blocks = RecentPrompts(WorkerSlots()), chain(3, 20, 1)
    recent.add(1, "a", blocks)
    recent.end(1, now=10.0)
    recent.expire(10.0 + KEPT_SECONDS / 2)
    assert match(recent, blocks[:5]) == {"a": 5}
    recent.expire(10.0 + KEPT_SECONDS)
    assert match(recent, blocks) == {}


def test_one_call_removes_a_limited_number_of_records() -> None:
    recent, num = RecentPrompts(WorkerSlots()), 2 * MAX_EXPIRED + 1
    for request in range(num):
        recent.add(request, "a", chain(3, 20, request))
        recent.end(request, now=10.0)
    for left in (MAX_EXPIRED + 1, 1, 0, 0):
        recent.expire(10.0 + KEPT_SECONDS)
        assert len(recent) == left


def test_request_that_is_placed_again_is_recorded_at_its_new_worker_only() -> None:
    recent, blocks = RecentPrompts(WorkerSlots()), chain(3, 20, 1)
    recent.add(1, "a", blocks)
    recent.end(1, now=0.0)
    recent.add(1, "b", blocks)
    recent.expire(100.0)
    assert set(match(recent, blocks)) == {"b"}


@given(st.lists(st.tuples(st.sampled_from("ab"), prompts, st.booleans()), max_size=6), prompts)
def test_recent_prompts_are_consulted_exactly_if_they_raise_a_depth(
    known: list[tuple[str, list[int], bool]], prompt: list[int]
) -> None:
    slots = WorkerSlots()
    index, recent = PrefixIndex(slots), RecentPrompts(slots)
    for request, (worker, blocks, is_recent) in enumerate(known):
        if is_recent:
            recent.add(request, worker, blocks)
        else:
            index.store(worker, blocks, START)
    before = CachedPrefix(slots, levels := index.levels(prompt)).as_dict()
    after = CachedPrefix(slots, recent.levels(prompt)).as_dict()
    raised = any(depth > before.get(worker, 0) for worker, depth in after.items())
    assert recent.exceeds(prompt, levels) == raised
    both = CachedPrefix(slots, merge_levels([(1, levels), (1, recent.levels(prompt))]))
    workers = {*before, *after}
    largest = {each: max(before.get(each, 0), after.get(each, 0)) for each in workers}
    assert both.as_dict() == largest
    assert {worker: both.get(worker, 0) for worker in "abc"} == {
        worker: largest.get(worker, 0) for worker in "abc"
    }
