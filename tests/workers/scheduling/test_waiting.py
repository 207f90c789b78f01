"""WaitingQueue: order and removal from the middle. SequenceState: chain of block hashes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.block_hash import block_hash, root_hash
from penstock.common.sampling_params import SamplingParams
from penstock.workers.scheduling.sequence import NewSequence
from penstock.workers.scheduling.waiting import SequenceState, WaitingQueue

ROOT = root_hash(bytes(range(32)), b"")


def make_state(number: int, num_tokens: int = 3, source_len: int = 0) -> SequenceState:
    new = NewSequence(number, range(num_tokens), num_tokens, SamplingParams())
    tokens = np.arange(num_tokens, dtype=np.int32)
    return SequenceState(new, number, tokens, yield_len=99, source_len=source_len, root=ROOT)


@given(st.lists(st.integers(0, 4), max_size=40))
def test_head_is_always_the_first_arrival(actions: list[int]) -> None:
    queue = WaitingQueue()
    model: list[SequenceState] = []
    for number, action in enumerate(actions):
        if action == 0 and model:  # remove any of the sequences
            queue.remove(model.pop(number % len(model)))
        elif action == 1 and model:  # admit and requeue the first sequence, like a preemption
            head = queue.head()
            assert head is not None
            queue.remove(head)
            queue.push(head)
        else:
            model.append(make_state(number))
            queue.push(model[-1])
        assert queue.head() is min(model, key=lambda each: each.arrival, default=None)
        assert len(queue) == len(model)
        assert queue.num_tokens == 3 * len(model)


def test_removed_entries_do_not_accumulate_behind_the_head() -> None:
    queue = WaitingQueue()
    queue.push(make_state(0))
    for number in range(1, 1000):
        removed = make_state(number)
        queue.push(removed)
        queue.remove(removed)
    assert len(queue._heap) < 50


def test_tokens_of_a_kv_source_are_not_counted() -> None:
    queue = WaitingQueue()
    queue.push(make_state(0, num_tokens=10, source_len=9))
    assert queue.num_tokens == 1


def test_hash_chain_is_computed_only_as_far_as_needed() -> None:
    tokens = np.arange(10, dtype=np.int32)
    first = block_hash(ROOT, tokens[:4])
    state = make_state(0)
    assert state.chain(tokens, 0, 4) == []
    assert state.chain(tokens, 1, 4) == [first]
    assert state.chain(tokens, 2, 4) == [first, block_hash(first, tokens[4:8])]
    assert state.chain(tokens, 1, 4) == [first]
