"""WaitingQueue: order, and what is taken out of its middle; Ticket: its hash chain."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.block_hash import block_hash, root_hash
from penstock.common.sampling_params import SamplingParams
from penstock.workers.scheduling.sequence import NewSequence
from penstock.workers.scheduling.waiting import SequenceState, WaitingQueue


def ticket(
    number: int, priority: int = 0, num_tokens: int = 3, source_len: int = 0
) -> SequenceState:
    new = NewSequence(number, range(num_tokens), num_tokens, SamplingParams(), priority=priority)
    tokens = np.arange(num_tokens, dtype=np.int32)
    return SequenceState(new, number, tokens, yield_len=99, source_len=source_len)


@given(st.lists(st.tuples(st.integers(-1, 1), st.integers(0, 4)), max_size=40))
def test_head_is_always_the_first_by_priority_then_arrival(
    verbs: list[tuple[int, int]],
) -> None:
    queue = WaitingQueue()
    model: list[SequenceState] = []
    for number, (priority, verb) in enumerate(verbs):
        if verb == 0 and model:  # somebody in the middle leaves
            queue.remove(model.pop(number % len(model)))
        elif verb == 1 and model:  # the head is seated, and comes back after a preemption
            head = queue.head()
            assert head is not None
            queue.remove(head)
            queue.push(head)
        else:
            model.append(ticket(number, priority))
            queue.push(model[-1])
        assert queue.head() is min(model, key=lambda each: each.order, default=None)
        assert len(queue) == len(model)
        assert queue.num_tokens == 3 * len(model)


def test_shadows_do_not_pile_up_behind_a_head_that_stays() -> None:
    queue = WaitingQueue()
    queue.push(ticket(0))
    for number in range(1, 1000):
        gone = ticket(number)
        queue.push(gone)
        queue.remove(gone)
    assert len(queue._heap) < 50


def test_what_a_source_offers_is_not_counted_as_work() -> None:
    queue = WaitingQueue()
    queue.push(ticket(0, num_tokens=10, source_len=9))
    assert queue.num_tokens == 1


def test_chain_is_hashed_as_far_as_it_is_needed() -> None:
    tokens = np.arange(10, dtype=np.int32)
    first = block_hash(root_hash(b""), tokens[:4])
    asked = ticket(0)
    assert asked.chain(tokens, 0, 4) == []
    assert asked.chain(tokens, 1, 4) == [first]
    assert asked.chain(tokens, 2, 4) == [first, block_hash(first, tokens[4:8])]
    assert asked.chain(tokens, 1, 4) == [first]
