"""Rules of the fair line (a queue): order, shares and bounds, for any jobs."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.errors import ServingError
from penstock.router.requests.fair_line import (
    LEAST_SIZE,
    MAX_RETRY_SECONDS,
    MIN_RETRY_SECONDS,
    FairLine,
)

SIZE = 2 * LEAST_SIZE
TENANTS = "abc"


class World:
    """A `FairLine` (a queue) whose jobs are (tenant, number), and the state of each job."""

    def __init__(self, num_slots: int, slot_size: int) -> None:
        self.line: FairLine[tuple[str, int]] = FairLine(10**9, num_slots, slot_size)
        self.slot_size = slot_size
        self.waiting: dict[str, list[tuple[str, int]]] = {name: [] for name in TENANTS}
        self.running: list[list[tuple[str, int]]] = [[] for _ in range(num_slots)]
        self.count = 0

    def add(self, tenant: str) -> None:
        self.count += 1
        job = (tenant, self.count)
        self.line.add(tenant, job, SIZE)
        self.waiting[tenant].append(job)

    def take(self) -> None:
        begun = self.line.take(range(len(self.running)))
        if begun is None:
            idle = any(not jobs for jobs in self.running)
            bound = {jobs[0][0] for jobs in self.running if jobs}
            assert not idle or not any(self.waiting[name] for name in TENANTS if name not in bound)
            return
        tenant = begun.job[0]
        assert begun.job == self.waiting[tenant].pop(0)
        slot = self.running[begun.slot]
        assert {job[0] for job in slot} <= {tenant}
        assert not any(tenant == jobs[0][0] for jobs in self.running if jobs and jobs is not slot)
        slot.append(begun.job)
        assert len(slot) == 1 or len(slot) * SIZE <= self.slot_size

    def end(self, slot: int) -> None:
        if self.running[slot]:
            self.running[slot].pop(0)
            self.line.end(slot)

    def remove(self, tenant: str) -> None:
        if self.waiting[tenant]:
            self.line.remove(tenant, self.waiting[tenant].pop())


ACTIONS: dict[str, Callable[[World, int], None]] = {
    "add": lambda world, number: world.add(TENANTS[number % len(TENANTS)]),
    "take": lambda world, number: world.take(),
    "end": lambda world, number: world.end(number % len(world.running)),
    "remove": lambda world, number: world.remove(TENANTS[number % len(TENANTS)]),
}


@given(
    num_slots=st.integers(1, 3),
    slot_size=st.sampled_from([0, SIZE, 3 * SIZE]),
    actions=st.lists(st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 5)), max_size=80),
)
def test_a_tenant_uses_one_slot_and_its_jobs_keep_their_order(
    num_slots: int, slot_size: int, actions: list[tuple[str, int]]
) -> None:
    world = World(num_slots, slot_size)
    for name, number in actions:
        ACTIONS[name](world, number)
        assert world.line.num_waiting == sum(map(len, world.waiting.values()))
    while world.line.num_waiting:
        world.take()
        for slot in range(num_slots):
            world.end(slot)


def test_measured_work_counts_for_the_next_turn() -> None:
    line: FairLine[str] = FairLine(10**9, 1)
    for tenant in ("slow", "quick"):
        for number in range(4):
            line.add(tenant, f"{tenant}{number}", SIZE)
    order = []
    while (begun := line.take([0])) is not None:
        order.append(begun.job)
        line.end(begun.slot, 10 * SIZE if begun.job.startswith("slow") else 0)
    assert order[:5] == ["slow0", "quick0", "quick1", "quick2", "quick3"]


def test_slot_becomes_free_for_a_tenant_that_was_served_less() -> None:
    line: FairLine[str] = FairLine(10**9, 1, 4 * SIZE)
    for number in range(8):
        line.add("greedy", f"g{number}", SIZE)
    assert [line.take([0]) is not None for _ in range(5)] == [True] * 4 + [False]
    line.add("other", "o", SIZE)
    line.end(0)
    assert line.take([0]) is None  # `other` was served less, so it gets the next free slot
    for _ in range(3):
        line.end(0)
    begun = line.take([0])
    assert begun is not None
    assert begun.job == "o"


def test_slots_that_are_not_usable_get_no_job() -> None:
    line: FairLine[str] = FairLine(10**9, 2, 4 * SIZE)
    line.add("a", "x", SIZE)
    assert line.take([]) is None
    begun = line.take([1])
    assert begun is not None
    assert begun.slot == 1
    line.add("a", "y", SIZE)
    assert line.take([0]) is None  # a tenant may use only one of the two slots


def test_cleared_line_is_empty_and_takes_jobs_again() -> None:
    line: FairLine[str] = FairLine(4 * SIZE, 1)
    line.add("a", "x", SIZE)
    assert line.clear() == ["x"]
    assert line.num_waiting == 0
    line.add("a", "y", 100 * SIZE)
    with pytest.raises(ServingError, match="wait to be tokenized"):
        line.add("b", "z", SIZE)


def test_retry_after_is_the_time_that_waiting_jobs_need() -> None:
    now = 0.0
    line: FairLine[str] = FairLine(8 * SIZE, 2, clock=lambda: now)

    def refusal(tenant: str) -> float:
        with pytest.raises(ServingError) as refused:
            line.add(tenant, "one more", 9 * SIZE)
        assert refused.value.retry_after is not None
        return refused.value.retry_after

    line.add("a", "a", SIZE)
    assert refusal("b") == MIN_RETRY_SECONDS  # no job has ended, so the speed is unknown
    begun = line.take([0])
    assert begun is not None
    now = 3.0
    line.end(begun.slot)
    line.add("a", "a0", SIZE)
    line.add("a", "a1", SIZE)
    assert refusal("a") == pytest.approx(2 * 3.0)  # a tenant uses only one slot
    line.add("b", "b0", SIZE)
    line.add("b", "b1", SIZE)
    assert refusal("c") == pytest.approx(4 * 3.0 / 2)  # two tenants use both slots
    for _ in range(20):  # a fast machine, or short texts
        begun = line.take([0])
        assert begun is not None
        line.add(begun.job[0], begun.job, SIZE)
        now += 0.001
        line.end(begun.slot)
    assert 1 <= refusal("c") < 3.0
    begun = line.take([0])
    assert begun is not None
    now += 1e4
    line.end(begun.slot)
    assert refusal("c") == MAX_RETRY_SECONDS


def test_jobs_whose_results_arrive_together_count_with_their_whole_time() -> None:
    now = 0.0
    line: FairLine[int] = FairLine(64 * SIZE, 1, 32 * SIZE, clock=lambda: now)
    for _ in range(8):
        for number in range(16):
            line.add("a", number, SIZE)
        while line.take([0]) is not None:
            pass
        now += 16 * 0.5
        for _ in range(16):
            line.end(0)
    for number in range(16):
        line.add("a", number, SIZE)
    with pytest.raises(ServingError) as refused:
        line.add("a", 17, SIZE)
    assert refused.value.retry_after == pytest.approx(16 * 0.5)


def test_dropped_jobs_do_not_change_the_measured_speed() -> None:
    now = 0.0
    line: FairLine[int] = FairLine(8 * SIZE, 1, 8 * SIZE, clock=lambda: now)
    for was_done, seconds in ((True, 3.0), (False, 0.0)):
        line.add("a", 0, SIZE)
        assert line.take([0]) is not None
        now += seconds
        line.end(0, was_done=was_done)
    line.add("a", 1, SIZE)
    with pytest.raises(ServingError) as refused:
        line.add("a", 2, 8 * SIZE)
    assert refused.value.retry_after == pytest.approx(3.0)
