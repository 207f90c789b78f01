"""Shares of tenants in the queue: requests are accepted, refused or displaced."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.router.routing.queue.fair_queue import FairQueue
from penstock.router.routing.queue.tenant_queue import QueuedRequest
from penstock.router.routing.queue.tenant_quotas import LARGEST_FRACTION, Amount, amount_of


class Admission:
    """Adds requests to a queue as the dispatcher does, and records the waiting requests."""

    def __init__(self, bounds: Amount) -> None:
        self.bounds = bounds
        self.queue = FairQueue(bounds)
        self.waiting: dict[int, QueuedRequest] = {}
        self.count = 0

    def arrive(
        self, tenant: str, tokens: int = 1, cost: int = 1, priority: int = 0
    ) -> list[int] | None:
        """Add a request; return the displaced requests, or None if the new request is refused."""
        entry = QueuedRequest(self.count, tenant, priority, tokens, cost=cost)
        displaced = self.queue.displaced_by(entry)
        if displaced is not None:
            for request in displaced:
                self.queue.remove(request)
                del self.waiting[request]
            self.queue.add(entry)
            self.waiting[entry.request] = entry
            self.count += 1
        self.queue.check()
        return displaced

    def held(self, tenant: str) -> Amount:
        return amount_of(each for each in self.waiting.values() if each.tenant == tenant)

    def numbers(self) -> dict[str, int]:
        tenants = {each.tenant for each in self.waiting.values()}
        return {tenant: self.held(tenant).requests for tenant in tenants}


def test_lone_tenant_may_fill_the_queue() -> None:
    admission = Admission(Amount(8, 100, 100))
    assert [admission.arrive("a") for _ in range(8)] == [[]] * 8
    assert admission.arrive("a") is None


def test_full_queue_of_one_tenant_takes_another_tenants_request() -> None:
    """A new request displaces the newest request of the tenant that exceeds its share the most."""
    admission = Admission(Amount(1024, 10**6, 10**6))
    while admission.arrive("greedy") is not None:
        pass
    assert admission.numbers() == {"greedy": 1024}
    assert admission.arrive("other", 5) == [1023]
    assert admission.arrive("other", 5) == [1022]
    assert admission.arrive("greedy") is None


def test_shares_become_equal_under_constant_pressure() -> None:
    admission = Admission(Amount(40, 10**6, 10**6))
    for tenant in "abcdefghij":
        for _ in range(100):
            admission.arrive(tenant)
    assert admission.numbers() == dict.fromkeys("abcdefghij", 4)


def test_one_of_many_tenants_holds_at_most_a_quarter() -> None:
    admission = Admission(Amount(40, 10**6, 10**6))
    for tenant in "bcde":
        admission.arrive(tenant)
    while admission.arrive("a") is not None:
        pass
    assert admission.numbers()["a"] == 40 * LARGEST_FRACTION


@pytest.mark.parametrize(("tokens", "cost"), [(10, 1), (1, 10)])
def test_prompt_tokens_and_cost_count_as_well_as_requests(tokens: int, cost: int) -> None:
    """Size counts, not number: few large requests are displaced before many small ones."""
    admission = Admission(Amount(100, 100, 100))
    for _ in range(6):
        admission.arrive("large", tokens, cost)
    for _ in range(40):
        admission.arrive("many")
    assert admission.arrive("small", 4, 4) == [5]
    assert admission.numbers() == {"many": 40, "large": 5, "small": 1}


def test_request_of_lowest_priority_is_displaced_first() -> None:
    admission = Admission(Amount(3, 100, 100))
    for priority in (0, 7, -1):
        admission.arrive("a", priority=priority)
    assert admission.arrive("b") == [1]


def test_empty_queue_accepts_a_request_of_any_size() -> None:
    admission = Admission(Amount(8, 100, 100))
    assert admission.arrive("a", 5000, 9000) == []
    assert admission.arrive("a") is None


def test_request_that_would_displace_in_vain_displaces_nothing() -> None:
    admission = Admission(Amount(8, 100, 100))
    for tenant in "ab":
        admission.arrive(tenant, 45)
    assert admission.arrive("c", 60) is None
    assert admission.numbers() == {"a": 1, "b": 1}


class AdmissionMachine(RuleBasedStateMachine):
    """Random requests of six tenants arrive, are placed, are removed or return after a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(Amount(8, 100, 400))
        self.outcomes = {"placed": 0, "removed": 0, "displaced": 0}
        self.num_requeued = 0

    def _fraction(self, amount: Amount) -> float:
        return amount.fraction_of(self.admission.bounds)

    @rule(
        tenant=st.sampled_from("abcdef"),
        tokens=st.integers(1, 30) | st.integers(1, 130),
        sequences=st.sampled_from([1, 1, 2, 8]),
        priority=st.integers(-1, 1),
    )
    def arrive(self, tenant: str, tokens: int, sequences: int, priority: int) -> None:
        admission, cost = self.admission, sequences * (tokens + 5)
        before = dict(admission.waiting)
        entry = QueuedRequest(admission.count, tenant, priority, tokens, cost=cost)
        own = self._fraction(admission.held(tenant).plus(entry))
        num_tenants = len({each.tenant for each in before.values()} | {tenant})
        displaced = admission.arrive(tenant, tokens, cost, priority)
        if displaced is None:
            assert own > 1 / num_tenants, "a tenant below its share was refused"
            assert admission.waiting == before
            return
        self.outcomes["displaced"] += len(displaced)
        if any(each.tenant == tenant for each in before.values()):
            assert own <= max(LARGEST_FRACTION, 1 / num_tenants)
        for name in {before[request].tenant for request in displaced}:
            line = [each for each in before.values() if each.tenant == name]
            chosen = [each.request for each in line if each.request in displaced]
            assert self._fraction(amount_of(line)) > own, "displaced from a smaller share"
            line.sort(key=lambda each: (each.priority, each.request))
            assert sorted(chosen) == sorted(each.request for each in line[-len(chosen) :])

    @rule()
    def place(self) -> None:
        head = self.admission.queue.head()
        if head is not None:
            self.admission.queue.dequeue(head, 0.0)
            self.outcomes["placed"] += self.admission.waiting.pop(head, None) is not None

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if self.admission.waiting:
            request = data.draw(st.sampled_from(sorted(self.admission.waiting)))
            self.admission.queue.remove(request)
            del self.admission.waiting[request]
            self.outcomes["removed"] += 1

    @rule(tenant=st.sampled_from("abcdef"))
    def requeue(self, tenant: str) -> None:
        """A request of a lost worker returns to the queue, even above the bounds of the queue."""
        self.num_requeued += 1
        request = QueuedRequest(-self.num_requeued, tenant, 0, 50, is_requeued=True, cost=400)
        self.admission.queue.add(request)

    @invariant()
    def every_request_is_in_one_place(self) -> None:
        admission = self.admission
        admission.queue.check()
        assert admission.count == len(admission.waiting) + sum(self.outcomes.values())
        assert all(request in admission.queue for request in admission.waiting)


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
