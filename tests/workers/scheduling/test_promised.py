"""PromisedQueue: as many first tokens in time as can be, priorities, nobody left for ever."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.scheduling.promised import (
    PATIENCE,
    TURN,
    PromisedQueue,
    PromptPace,
    Wait,
    in_time,
)
from penstock.workers.scheduling.sequence import NewSequence, SamplingParams
from penstock.workers.scheduling.waiting import Ticket

PROMISED = 2.0


def ticket(number: int, num_prompt: int = 1000, priority: int = 0, answered: int = 0) -> Ticket:
    num_tokens = num_prompt + answered
    new = NewSequence(number, range(num_tokens), num_prompt, SamplingParams(), priority=priority)
    return Ticket(new, number, np.zeros(num_tokens, np.int32), yield_len=99, source_len=0)


def queue_at(seconds_per_token: float = 0.001) -> PromisedQueue:
    """At time 1 a token takes so long."""
    queue = PromisedQueue(PROMISED)
    queue.planning(0.0, 0)
    queue.planning(1.0, round(1 / seconds_per_token))
    return queue


def num_kept(waits: list[Wait], now: float) -> int:
    """Of those that are served in this order."""
    kept = 0
    for each in waits:
        now += each.seconds
        kept += now <= each.due(PROMISED)
    return kept


def served(waits: list[Wait], now: float) -> list[Wait]:
    """All of them, one after the other, as the queue would have it."""
    left, order = list(waits), []
    while left:
        order.append(left.pop(in_time(left, now, PROMISED)))
        now += order[-1].seconds
    return order


# Sixteenths of a second: sums of them are exact, so that "just in time" means the same to all.
times = st.integers(0, 64).map(lambda value: value / 16)
lengths = st.integers(1, 40).map(lambda value: value / 16)
crowds = st.lists(st.builds(Wait, times, lengths), max_size=6).map(
    lambda waits: sorted(waits, key=lambda each: each.since)
)


@given(crowds)
def test_no_order_keeps_more_promises(waits: list[Wait]) -> None:
    best = max(num_kept(list(order), 4.0) for order in permutations(waits))
    assert num_kept(served(waits, 4.0), 4.0) == best


@given(crowds)
def test_by_when_each_is_due_where_that_keeps_all_promises(waits: list[Wait]) -> None:
    in_order = sorted(waits, key=lambda each: each.due(PROMISED))
    if num_kept(in_order, 4.0) == len(waits):
        due = [each.due(PROMISED) for each in served(waits, 4.0)]
        assert due == sorted(due)


def test_equal_prompts_that_all_keep_theirs_go_by_arrival() -> None:
    queue = queue_at()
    for number in range(3):
        queue.push(ticket(number, num_prompt=100))
    assert [taken(queue).number for _ in range(3)] == [0, 1, 2]


def taken(queue: PromisedQueue) -> Ticket:
    head = queue.head()
    assert head is not None
    queue.remove(head)
    return head


def test_a_long_prompt_stands_back_for_many_short_ones() -> None:
    queue = queue_at()
    queue.push(ticket(0, num_prompt=3000))
    for number in range(1, 40):
        queue.push(ticket(number, num_prompt=60))
    assert [taken(queue).number for _ in range(40)] == [*range(1, 40), 0]


def test_what_is_late_already_goes_last() -> None:
    queue = queue_at()
    queue.push(ticket(0, num_prompt=100))
    queue.planning(2.0, 1000)
    queue.planning(2.0 + PROMISED + 0.45, 1000)
    queue.push(ticket(1, num_prompt=100))
    assert [taken(queue).number for _ in range(2)] == [1, 0]


def test_before_anything_is_known_of_its_pace_it_goes_by_arrival() -> None:
    queue = PromisedQueue(PROMISED)
    for number in range(3):
        queue.push(ticket(number, num_prompt=1000 - number))
    queue.planning(5.0, 0)
    assert [taken(queue).number for _ in range(3)] == [0, 1, 2]


def test_priorities_come_first_and_who_has_tokens_before_who_has_none() -> None:
    queue = queue_at()
    for each in (ticket(0), ticket(1, answered=5), ticket(2, priority=1), ticket(3, answered=5)):
        queue.push(each)
    queue.planning(60.0, 1000)
    assert [taken(queue).number for _ in range(4)] == [2, 1, 3, 0]


def test_who_has_waited_for_long_gets_a_turn_however_many_come() -> None:
    queue, now = queue_at(), 1.0
    queue.push(ticket(-1, num_prompt=3000))
    for number in range(0, 400, 2):
        # Twice as much arrives as can be computed, so there is always somebody who can be in time.
        queue.push(ticket(number, num_prompt=500))
        queue.push(ticket(number + 1, num_prompt=400))
        queue.planning(now := now + 0.5, 1000)
        if taken(queue).number == -1:
            break
    assert PATIENCE * PROMISED < now - 1.5 <= PATIENCE * PROMISED + 0.5 * TURN


verbs = st.lists(
    st.tuples(st.sampled_from("pprt"), st.integers(0, 9), st.integers(-1, 1)), max_size=60
)


@given(verbs)
def test_everyone_is_there_until_taken_and_nobody_goes_before_a_higher_priority(
    verbs: list[tuple[str, int, int]],
) -> None:
    queue, model = queue_at(), dict[int, Ticket]()
    for number, (verb, value, priority) in enumerate(verbs):
        if verb == "p":
            model[number] = ticket(number, 100 + 400 * value, priority)
            queue.push(model[number])
        elif verb == "r" and model:
            queue.remove(model.pop(list(model)[value % len(model)]))
        else:
            queue.planning(1.0 + number * value, 1000 + 10 * number)
        head = queue.head()
        assert (head is None) == (not model)
        if head is not None:
            assert model[head.number] is head
            assert head.new.priority == max(each.new.priority for each in model.values())
        assert len(queue) == len(model)
        assert queue.num_tokens == sum(each.num_uncomputed for each in model.values())


def test_idle_time_says_nothing_of_the_pace() -> None:
    pace = PromptPace()
    pace.planned(0.0, 0)
    pace.planned(1.0, 500)
    pace.planned(100.0, 500)
    pace.planned(101.0, 1000)
    assert pace.seconds_per_token == pytest.approx(0.002)
