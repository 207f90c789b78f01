from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.router.routing.queue.dequeue_rate import DequeueRate
from penstock.router.routing.queue.fair_queue import MAX_TENANTS, FairQueue
from penstock.router.routing.queue.tenant_queue import QueuedRequest
from penstock.router.routing.queue.tenant_quotas import Amount


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
    queue = FairQueue(Amount(10, 1000, 10**9))
    for request in (3, 1, 2):
        queue.add(entry(request))
    assert take_all(queue) == [3, 1, 2]


def test_lower_priority_value_comes_first_within_a_tenant() -> None:
    queue = FairQueue(Amount(10, 1000, 10**9))
    for request, priority in enumerate([0, -1, 5, 0]):
        queue.add(entry(request, priority=priority))
    assert take_all(queue) == [1, 0, 3, 2]


def test_priority_of_one_tenant_does_not_delay_another() -> None:
    queue = FairQueue(Amount(100, 10_000, 10**9))
    for request in range(4):
        queue.add(entry(request, "urgent", priority=-1000))
        queue.add(entry(10 + request, "other", priority=1000))
    order = take_all(queue)
    for served in range(2, 9, 2):
        assert sum(request >= 10 for request in order[:served]) == served // 2


def test_requeued_request_comes_before_any_priority_of_its_tenant() -> None:
    queue = FairQueue(Amount(10, 1000, 10**9))
    queue.add(entry(0, priority=-5))
    queue.add(QueuedRequest(1, "", 5, 10, is_requeued=True))
    assert take_all(queue) == [1, 0]


def test_tenants_get_equal_numbers_of_tokens_not_of_requests() -> None:
    queue = FairQueue(Amount(100, 10_000, 10**9))
    for request in range(40):
        queue.add(entry(request, "long", tokens=30))
        queue.add(entry(100 + request, "short", tokens=10))
    first = take_all(queue)[:40]
    counts = Counter("long" if request < 100 else "short" for request in first)
    assert counts == {"long": 10, "short": 30}


def test_output_tokens_count_double() -> None:
    queue = FairQueue(Amount(100, 10_000, 10**9))
    queue.add(entry(0, "a"))
    queue.add(entry(1, "b"))
    # Output tokens count double, so tenant "a" has used 12. This is more than 10, the prompt of
    # "b".
    queue.charge_output("a", 6)
    queue.add(entry(2, "b"))
    assert take_all(queue) == [1, 2, 0]


def test_new_tenant_starts_without_credit() -> None:
    queue = FairQueue(Amount(100, 10_000, 10**9))
    for request in range(20):
        queue.add(entry(request, "old"))
    for request in range(10):
        queue.dequeue(request, 0.0)
    for request in range(100, 110):
        queue.add(entry(request, "new"))
    first = take_all(queue)[:4]
    assert sorted(first) == [10, 11, 100, 101]


def test_tenant_keeps_its_debt_while_it_has_no_requests() -> None:
    queue = FairQueue(Amount(100, 10_000, 10**9))
    queue.add(entry(0, "greedy", tokens=1000))
    queue.add(entry(1, "other"))
    assert take_all(queue) == [0, 1]
    for request in (2, 3):
        queue.add(entry(10 + request, "other"))
        queue.add(entry(request, "greedy"))
    assert take_all(queue) == [12, 13, 2, 3]


def test_requeued_request_is_first_of_its_tenant_and_outside_the_bound() -> None:
    queue = FairQueue(Amount(2, 1000, 10**9))
    queue.add(entry(0))
    queue.add(entry(1))
    assert queue.displaced_by(entry(2)) is None
    for request in (7, 8):
        queue.add(QueuedRequest(request, "", 0, 10, is_requeued=True))
    assert (len(queue), queue.num_tokens) == (4, 20)
    assert take_all(queue) == [7, 8, 0, 1]


def test_requeued_request_is_not_charged_again() -> None:
    queue = FairQueue(Amount(10, 1000, 10**9))
    queue.add(QueuedRequest(0, "a", 0, 500, is_requeued=True))
    queue.add(entry(1, "b"))
    queue.dequeue(0, 0.0)
    queue.add(entry(2, "a", tokens=1))
    assert take_all(queue) == [1, 2]


def test_removing_an_unknown_request_does_nothing() -> None:
    queue = FairQueue(Amount(2, 100, 10**9))
    queue.remove(5)
    assert len(queue) == 0
    assert queue.head() is None


def costly(request: int, tenant: str, cost: int, since: float = 0.0) -> QueuedRequest:
    return QueuedRequest(request, tenant, 0, 1, cost=cost, arrived_at=since)


def test_retry_time_is_computed_from_backlog_and_measured_speed() -> None:
    queue = FairQueue(Amount(1000, 10**9, 10**9))
    for request in range(100):
        queue.add(costly(request, "a", 500))
    refused = costly(1000, "a", 500)
    assert queue.retry_after(refused, 0.0) == pytest.approx(50_500 / DequeueRate.ASSUMED)
    now = 0.0
    for request in range(60):
        now += 0.1  # one request with a cost of 500 is served every 0.1 s
        queue.dequeue(request, now)
    assert queue.retry_after(refused, now) == pytest.approx(20_500 / 5000, rel=0.01)
    assert queue.retry_after(refused, now + 1000.0) == FairQueue.MAX_RETRY
    take_all(queue, now)
    assert queue.retry_after(refused, now) == FairQueue.MIN_RETRY


def test_retry_time_of_a_tenant_counts_equal_service_of_the_others() -> None:
    queue = FairQueue(Amount(1000, 10**9, 10**9))
    for request in range(40):
        queue.add(costly(request, "much", 1000))
    for request in range(40, 50):
        queue.add(costly(request, "little", 300))
    # Each tenant is served a cost of 500 per second. After 6 s, the whole cost of "little" (3000)
    # is served, and a cost of 3000 of "much".
    assert queue.retry_after(costly(40, "little", 300), 0.0) == pytest.approx(6.0)
    assert queue.retry_after(costly(0, "much", 1000), 0.0) == pytest.approx(43.0)


def test_speed_is_not_measured_while_nothing_waits() -> None:
    rate, now = DequeueRate(), 0.0
    for _ in range(100):
        rate.began_to_wait(now)
        now += 0.1
        rate.add(400, now - 0.1, now)
        rate.emptied()
    measured = rate.value(now)
    assert measured == rate.last_measured == pytest.approx(4000.0, rel=0.01)
    later = now + 3600.0
    assert rate.value(later) == measured
    rate.began_to_wait(later)
    rate.add(10**9, later, later)
    assert rate.value(later) == measured, "a request that did not wait does not count"


def test_speed_decreases_while_requests_wait_and_none_is_placed() -> None:
    rate = DequeueRate()
    rate.began_to_wait(0.0)
    assert rate.value(0.0) == DequeueRate.ASSUMED
    rate.add(2000, 0.0, 2.0)
    assert rate.value(2.0) == rate.last_measured
    assert rate.value(32.0) < rate.value(2.0) / 10
    assert rate.last_measured == rate.value(2.0)


def test_number_of_tenant_counters_is_bounded() -> None:
    queue = FairQueue(Amount(10, 1000, 10**9))
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
    queue = FairQueue(Amount(100, 10_000, 10**9))
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
        assert len(queue) == len(inside)
        assert all(each in queue for each in inside)
    assert sorted(take_all(queue)) == sorted(inside)
