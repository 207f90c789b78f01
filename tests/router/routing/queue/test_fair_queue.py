from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.router.routing.queue.fair_queue import (
    MAX_TENANTS,
    DequeueRate,
    FairQueue,
    QueuedRequest,
)


def take_all(queue: FairQueue, now: float = 0.0) -> list[int]:
    order = []
    while (head := queue.head()) is not None:
        queue.dequeue(head, now)
        queue.check()
        order.append(head)
    return order


def entry(request: int, tenant: str = "", priority: int = 0, tokens: int = 10) -> QueuedRequest:
    return QueuedRequest(request, tenant, priority, tokens)


def test_one_tenant_is_served_in_order() -> None:
    queue = FairQueue(10, 1000)
    for request in (3, 1, 2):
        queue.add(entry(request))
    assert take_all(queue) == [3, 1, 2]


def test_higher_priorities_come_first() -> None:
    queue = FairQueue(10, 1000)
    for request, priority in enumerate([0, -1, 5, 0]):
        queue.add(entry(request, priority=priority))
    assert take_all(queue) == [2, 0, 3, 1]


def test_tenants_get_equal_numbers_of_tokens_not_of_requests() -> None:
    queue = FairQueue(100, 10_000)
    for request in range(40):
        queue.add(entry(request, "long", tokens=30))
        queue.add(entry(100 + request, "short", tokens=10))
    first = take_all(queue)[:40]
    counts = Counter("long" if request < 100 else "short" for request in first)
    assert counts == {"long": 10, "short": 30}


def test_output_tokens_count_double() -> None:
    queue = FairQueue(100, 10_000)
    queue.add(entry(0, "a"))
    queue.add(entry(1, "b"))
    queue.charge_output("a", 6)  # counts double: 12 exceeds b's prompt of 10
    queue.add(entry(2, "b"))
    assert take_all(queue) == [1, 2, 0]


def test_new_tenant_starts_without_credit() -> None:
    queue = FairQueue(100, 10_000)
    for request in range(20):
        queue.add(entry(request, "old"))
    for request in range(10):
        queue.dequeue(request, 0.0)
    for request in range(100, 110):
        queue.add(entry(request, "new"))
    first = take_all(queue)[:4]
    assert sorted(first) == [10, 11, 100, 101]


def test_tenant_keeps_its_debt_while_it_has_no_requests() -> None:
    queue = FairQueue(100, 10_000)
    queue.add(entry(0, "greedy", tokens=1000))
    queue.add(entry(1, "other"))
    assert take_all(queue) == [0, 1]
    for request in (2, 3):
        queue.add(entry(10 + request, "other"))
        queue.add(entry(request, "greedy"))
    assert take_all(queue) == [12, 13, 2, 3]


def test_requeued_request_is_first_of_its_tenant_and_outside_the_bound() -> None:
    queue = FairQueue(2, 1000)
    queue.add(entry(0))
    queue.add(entry(1))
    assert queue.is_full(1)
    for request in (7, 8):
        queue.add(QueuedRequest(request, "", 0, 10, is_requeued=True))
    assert (len(queue), queue.num_tokens) == (4, 20)
    assert take_all(queue) == [7, 8, 0, 1]


def test_requeued_request_is_not_charged_again() -> None:
    queue = FairQueue(10, 1000)
    queue.add(QueuedRequest(0, "a", 0, 500, is_requeued=True))
    queue.add(entry(1, "b"))
    queue.dequeue(0, 0.0)
    queue.add(entry(2, "a", tokens=1))
    assert take_all(queue) == [1, 2]


def test_queue_is_bounded_in_requests_and_in_tokens() -> None:
    queue = FairQueue(2, 100)
    assert not queue.is_full(5000)  # an empty queue accepts any length
    queue.add(entry(0, tokens=60))
    assert not queue.is_full(40)
    assert queue.is_full(41)
    queue.add(entry(1, tokens=1))
    assert queue.is_full(1)
    queue.remove(0)
    assert not queue.is_full(1)


def test_removing_an_unknown_request_does_nothing() -> None:
    queue = FairQueue(2, 100)
    queue.remove(5)
    assert len(queue) == 0
    assert queue.head() is None


def test_retry_time_is_computed_from_backlog_and_dequeue_rate() -> None:
    queue = FairQueue(1000, 10**9)
    for request in range(100):
        queue.add(entry(request, tokens=500))
    assert queue.retry_after(0.0) == pytest.approx(50_000 / DequeueRate.ASSUMED)
    now = 0.0
    for request in range(50):
        queue.dequeue(request, now)
        now += 0.5  # 1000 tokens a second
    assert queue.retry_after(now) == pytest.approx(25.0, rel=0.2)
    assert queue.retry_after(now + 1000.0) == FairQueue.MAX_RETRY
    take_all(queue, now)
    assert queue.retry_after(now) == FairQueue.MIN_RETRY


def test_number_of_tenant_counters_is_bounded() -> None:
    queue = FairQueue(10, 1000)
    queue.add(entry(0, "waits"))
    for request in range(1, MAX_TENANTS + 100):
        queue.add(entry(request, f"tenant {request}"))
        queue.remove(request)
        assert len(queue._counters) <= MAX_TENANTS
    assert take_all(queue) == [0]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.integers(1, 50), st.booleans()),
        max_size=30,
    ),
    st.data(),
)
def test_no_request_is_lost_under_random_adds_removals_and_dequeues(
    adds: list[tuple[str, int, int, bool]], data: st.DataObject
) -> None:
    queue = FairQueue(100, 10_000)
    inside: set[int] = set()
    for request, (tenant, priority, tokens, again) in enumerate(adds):
        queue.add(QueuedRequest(request, tenant, priority, tokens, again))
        inside.add(request)
        if data.draw(st.booleans()):
            removed = data.draw(st.sampled_from(sorted(inside)))
            queue.remove(removed)
            inside.remove(removed)
        elif (head := queue.head()) is not None and data.draw(st.booleans()):
            queue.dequeue(head, 0.0)
            inside.remove(head)
        queue.check()
        assert set(queue.requests()) == inside
    assert sorted(take_all(queue)) == sorted(inside)
