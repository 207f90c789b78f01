"""Order of queued prompts under a TTFT SLO, limits on starvation, and waits for capacity."""

import heapq
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.dispatcher import DispatcherLimits
from penstock.router.routing.events import (
    ClientDisconnected,
    Rejected,
    Stepped,
    TokenColumns,
    WorkerInfo,
    WorkerLost,
    WorkerUp,
)
from penstock.router.routing.queue.fair_queue import FairQueue
from penstock.router.routing.queue.slo_order import (
    STARVATION_FACTOR,
    STARVATION_INTERVAL,
    PrefillCapacity,
    due_times,
    moore_hodgson,
    prefill_capacity,
)
from penstock.router.routing.queue.tenant_queue import QueuedRequest
from penstock.router.routing.queue.tenant_quotas import Amount
from penstock.router.routing.worker_view import WorkerView
from tests.support.router_harness import Router, submits
from tests.support.router_world import info_of

TTFT_SLO = 2.0
ONE = PrefillCapacity(workers=1.0, seconds_per_token=0.001)


# ------------------------------------------------------------------ the order in which prompts run


class QueuedPrompt(NamedTuple):
    arrived_at: float
    seconds: float

    @property
    def due(self) -> float:
        return float(due_times(np.array(self.arrived_at), np.array(self.seconds), TTFT_SLO))


def selected(prompts: list[QueuedPrompt], now: float, workers: float) -> int:
    """Return the index of the prompt that `moore_hodgson` selects."""
    arrived_at, seconds = np.array(prompts, np.float64).reshape(-1, 2).T
    return moore_hodgson(arrived_at, seconds, now, TTFT_SLO, workers)


def selected_one_by_one(prompts: list[QueuedPrompt], now: float, workers: float) -> int:
    """Compute the result of `moore_hodgson` with lists instead of arrays."""
    latest = [each.due - each.seconds for each in prompts]
    able = [index for index, begin in enumerate(latest) if now <= begin]
    due = [begin + each.seconds / workers for begin, each in zip(latest, prompts, strict=True)]
    able.sort(key=lambda index: (due[index], index))
    end, back = now, set[int]()
    longest: list[tuple[float, int]] = []
    for index in able:
        end += prompts[index].seconds / workers
        heapq.heappush(longest, (-prompts[index].seconds / workers, -index))
        if end > due[index]:
            less, later = heapq.heappop(longest)
            end += less
            back.add(-later)
    return next((index for index in able if index not in back), 0)


def num_in_time(prompts: list[QueuedPrompt], now: float, workers: float) -> int:
    """Count the prompts that meet the SLO if they start in this order on `workers` workers."""
    num_met = 0
    for each in prompts:
        num_met += now <= each.due - each.seconds
        now += each.seconds / workers
    return num_met


def in_selected_order(
    prompts: list[QueuedPrompt], now: float, workers: float
) -> list[QueuedPrompt]:
    """Return all prompts in the order in which `moore_hodgson` selects them."""
    remaining, order = list(prompts), []
    while remaining:
        order.append(remaining.pop(selected(remaining, now, workers)))
        now += order[-1].seconds / workers
    return order


# Times are multiples of 1/16 s, so that sums and comparisons with deadlines are exact.
times = st.integers(0, 64).map(lambda value: value / 16)
lengths = st.integers(1, 40).map(lambda value: value / 16)
prompt_lists = st.lists(st.builds(QueuedPrompt, times, lengths), max_size=6).map(
    lambda prompts: sorted(prompts, key=lambda each: each.arrived_at)
)
worker_counts = st.sampled_from([0.5, 1.0, 2.0, 8.0])


@given(prompt_lists, worker_counts)
def test_no_other_order_meets_more_deadlines(prompts: list[QueuedPrompt], workers: float) -> None:
    best = max(num_in_time(list(order), 4.0, workers) for order in permutations(prompts))
    assert num_in_time(in_selected_order(prompts, 4.0, workers), 4.0, workers) == best


@given(prompt_lists, worker_counts)
def test_selected_prompt_is_in_time_if_any_prompt_can_be(
    prompts: list[QueuedPrompt], workers: float
) -> None:
    able = [each for each in prompts if 4.0 + each.seconds <= each.due]
    if prompts:
        index = selected(prompts, 4.0, workers)
        assert prompts[index] in able if able else index == 0


@given(prompt_lists)
def test_order_is_earliest_deadline_first_if_that_meets_all_deadlines(
    prompts: list[QueuedPrompt],
) -> None:
    in_order = sorted(prompts, key=lambda each: each.due)
    if num_in_time(in_order, 4.0, 1.0) == len(prompts):
        due = [each.due for each in in_selected_order(prompts, 4.0, 1.0)]
        assert due == sorted(due)


@given(prompt_lists, st.integers(2, 9))
def test_more_workers_never_meet_fewer_deadlines(prompts: list[QueuedPrompt], more: int) -> None:
    few, many = (
        num_in_time(in_selected_order(prompts, 4.0, n), 4.0, n) for n in (1.0, float(more))
    )
    assert few <= many


any_prompts = st.lists(
    st.builds(QueuedPrompt, st.floats(0, 4), st.floats(0, 3) | st.floats(0, 0.1)), max_size=60
).map(sorted)


@given(any_prompts, st.floats(0, 6), st.floats(0.1, 50))
def test_arrays_give_the_same_result_as_the_calculation_one_by_one(
    prompts: list[QueuedPrompt], now: float, workers: float
) -> None:
    assert selected(prompts, now, workers) == selected_one_by_one(prompts, now, workers)


# ------------------------------------------------------------------ SLO order in the fair queue


def queue_of(*entries: QueuedRequest) -> FairQueue:
    queue = FairQueue(Amount(1000, 10**9, 10**9), TTFT_SLO)
    for each in entries:
        queue.add(each)
    return queue


def entry(number: int, tokens: int = 1000, since: float = 0.0, **fields: object) -> QueuedRequest:
    known = {"tenant": "", "priority": 0, **fields}
    return QueuedRequest(number, num_tokens=tokens, arrived_at=since, **known)  # type: ignore[arg-type]


def take(queue: FairQueue, now: float, capacity: PrefillCapacity = ONE) -> int | None:
    request = queue.select(now, capacity)
    if request is not None:
        queue.dequeue(request, now)
        queue.check()
    return request


def test_equal_prompts_that_are_all_in_time_go_by_arrival() -> None:
    queue = queue_of(*(entry(number, 100) for number in range(3)))
    assert [take(queue, 0.0) for _ in range(3)] == [0, 1, 2]


def test_long_prompt_is_deferred_for_many_short_ones() -> None:
    queue = queue_of(entry(0, 3000), *(entry(number, 60) for number in range(1, 40)))
    assert [take(queue, 0.0) for _ in range(40)] == [*range(1, 40), 0]


def test_long_prompt_is_not_deferred_with_enough_workers() -> None:
    queue = queue_of(entry(0, 3000), *(entry(number, 60) for number in range(1, 40)))
    order = [take(queue, 0.0, PrefillCapacity(4.0, 0.001)) for _ in range(40)]
    assert order[-1] == 0, "its deadline is the latest"
    late = queue_of(entry(0, 3000), *(entry(number, 60, since=9.8) for number in range(1, 40)))
    assert take(late, 9.8, PrefillCapacity(4.0, 0.001)) == 0


def test_prompt_that_is_already_late_goes_last() -> None:
    queue = queue_of(entry(0, 100), entry(1, 100, since=TTFT_SLO + 1))
    assert [take(queue, TTFT_SLO + 1) for _ in range(2)] == [1, 0]


def test_order_is_by_arrival_until_the_prefill_speed_is_known() -> None:
    queue = queue_of(*(entry(number, 1000 - number) for number in range(3)))
    assert [take(queue, 0.0, PrefillCapacity(1.0, 0.0)) for _ in range(3)] == [0, 1, 2]


def test_requeued_requests_come_first_and_then_priorities() -> None:
    entries = entry(0), entry(1, is_requeued=True), entry(2, 9000, priority=-1), entry(3, 10)
    queue = queue_of(*entries)
    assert [take(queue, 60.0) for _ in range(4)] == [1, 2, 0, 3]


def test_deferred_prompt_is_selected_in_bounded_time_under_overload() -> None:
    queue, now = queue_of(entry(-1, 3000)), 0.0
    for number in range(0, 400, 2):
        # The load is too high, so there is always another prompt that can still meet its deadline.
        queue.add(entry(number, 500, now))
        queue.add(entry(number + 1, 400, now))
        now += 0.5
        if take(queue, now) == -1:
            break
    assert (
        STARVATION_FACTOR * TTFT_SLO
        < now
        <= STARVATION_FACTOR * TTFT_SLO + 0.5 * (STARVATION_INTERVAL + 1)
    )


def test_without_capacity_only_requeued_requests_are_eligible() -> None:
    queue = queue_of(entry(0))
    assert queue.select(0.0, None) is None
    queue.add(entry(1, is_requeued=True))
    assert queue.select(0.0, None) == 1


requests = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 5000), st.booleans()),
    max_size=30,
)


@given(requests, st.floats(0, 60), st.sampled_from([0.3, 1.0, 7.0]))
def test_slo_does_not_change_the_order_of_priorities_and_tenants(
    drawn: list[tuple[str, int, int, bool]], now: float, workers: float
) -> None:
    """The SLO changes the order within a tenant, but not which tenant is next."""
    plain, with_slo = (
        FairQueue(Amount(99, 10**9, 10**9)),
        FairQueue(Amount(99, 10**9, 10**9), TTFT_SLO),
    )
    entries = {
        number: entry(number, tokens, tenant=tenant, priority=priority, is_requeued=again)
        for number, (tenant, priority, tokens, again) in enumerate(drawn)
    }
    for queue in (plain, with_slo):
        for each in entries.values():
            queue.add(each)
    while (chosen := with_slo.select(now, PrefillCapacity(workers, 0.001))) is not None:
        head = plain.head()
        assert head is not None
        assert entries[head].priority == entries[chosen].priority
        assert entries[head].tenant == entries[chosen].tenant
        assert entries[head].is_requeued == entries[chosen].is_requeued
        for queue in (plain, with_slo):  # both queues must charge the tenant equally
            queue.dequeue(chosen, now)
            queue.check()
    assert plain.head() is None, "every request was dequeued"


# ------------------------------------------------------------------ prefill capacity


def reporting(view: WorkerView, **load: Any) -> WorkerView:
    """Report a speed of 1000 tokens/s in steps of 0.1 s, together with `load`."""
    speed = WorkerLoad(last_step_seconds=0.1, prompt_tokens_computed=10_000, prompt_seconds=10.0)
    view.update_load(speed._replace(**load), 0.0)
    return view


def view_of(name: str, role: str = "mixed", machine: str = "") -> WorkerView:
    info = info_of(name, role, machine=machine)
    return WorkerView(info, WorkerLoad(), 0.0, float("-inf"), queues_at_router=True)


def test_worker_gets_prompts_for_the_current_and_the_next_step() -> None:
    assert reporting(view_of("m"), queued_tokens=199).has_prefill_slot
    assert not reporting(view_of("m"), queued_tokens=200).has_prefill_slot


def test_worker_of_unknown_speed_gets_one_prompt_at_a_time() -> None:
    view = view_of("m")
    assert view.has_prefill_slot
    view.set_usage(1, view.resource_usage(5, 1), 5)
    assert not view.has_prefill_slot


def test_prompt_sent_during_a_step_counts_until_a_report_includes_it() -> None:
    view = reporting(view_of("m"))
    view.set_usage(1, view.resource_usage(1000, 1), 1000)
    assert not reporting(view).has_prefill_slot, "the reported step began before the prompt arrived"
    assert reporting(view, running=1, queued_tokens=150).has_prefill_slot


def test_capacity_is_none_only_if_no_worker_has_a_prefill_slot() -> None:
    views = [reporting(view_of(name)) for name in "mn"]
    assert prefill_capacity(views) == PrefillCapacity(2, 0.001)
    for view in views:
        view.set_usage(1, view.resource_usage(500, 1), 500)
    assert prefill_capacity(views) is None
    views.append(reporting(view_of("d", "decode")))
    assert prefill_capacity(views) == PrefillCapacity(2, 0.001), "a decode worker may also prefill"


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["prefill", "decode", "mixed"]),
            st.sampled_from(["here"] * 6 + ["", "there"]),
            st.sampled_from([False] * 6 + [True]),
            st.booleans(),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_decode_workers_count_only_if_all_usable_workers_share_cores(
    workers: list[tuple[str, str, bool, bool]],
) -> None:
    views = []
    for number, (role, machine, is_draining, is_assigned) in enumerate(workers):
        view = reporting(view_of(f"w{number}", role, machine))
        view.draining = is_draining
        if is_assigned:
            view.assign(role)
        views.append(view)
    usable = [each for each in workers if not each[2]]
    machines = {machine for _, machine, _, _ in usable}
    by_operator = any(role == "prefill" and assigned for role, _, _, assigned in usable)
    takers = [each for each in usable if each[0] != "decode"] or usable
    if len(machines) == 1 and machines != {""} and not by_operator:
        takers = usable
    expected = PrefillCapacity(len(takers), 0.001) if usable else None
    assert prefill_capacity(views) == expected


def test_cached_tokens_reduce_the_seconds_per_token() -> None:
    view = view_of("m")
    half = WorkerLoad(
        last_step_seconds=0.1,
        prompt_tokens_computed=5000,
        prompt_tokens_cached=5000,
        prompt_seconds=5.0,
    )
    view.update_load(half, 0.0)
    assert prefill_capacity([view]) == PrefillCapacity(1, 0.0005)


# ------------------------------------------------------------------ SLO order in the dispatcher

SLO_LIMITS = DispatcherLimits(ttft_slo_seconds=TTFT_SLO)
M, N = (info_of(name, "mixed", num_blocks=4096) for name in "mn")
ROLES = ("prefill", "decode")


def report(worker: str, tokens: int, total: int, running: int = 1) -> Stepped:
    load = WorkerLoad(
        running=running,
        queued_tokens=tokens,
        free_blocks=4096,
        last_step_seconds=0.1,
        num_steps=total,
        prompt_tokens_computed=total,
        prompt_seconds=total / 1000,
    )
    return Stepped(worker, TokenColumns(), load)


def router_of(*infos: WorkerInfo) -> Router:
    """Return a router; its workers have reported a speed of 1000 prompt tokens/s."""
    router = Router(*infos, limits=SLO_LIMITS)
    for info in infos:
        router(report(info.worker, 0, 5000, running=0))
    return router


def test_prompts_wait_at_the_router_for_the_first_worker_with_capacity() -> None:
    router = router_of(M, N)
    placed = [submits(router.arrive(number, 400)) for number in range(1, 4)]
    assert placed == [[("m", 1, 1)], [("n", 2, 1)], []]
    router.arrive(4, 10)
    assert router.dispatcher.num_queued == 2
    assert router.dispatcher.num_queued_tokens == 410
    assert set(router.dispatcher.short_of) == {"prefill", "decode", "mixed"}
    assert submits(router(report("m", 300, 5100))) == []
    assert submits(router(report("n", 195, 5250))) == [("n", 4, 1)], "its deadline is the earliest"
    assert submits(router(report("m", 100, 5300))) == [("m", 3, 1)]
    assert set(router.dispatcher.short_of) == set()


@pytest.mark.parametrize(("machine", "expected"), [("here", 1), ("", 2)])
def test_order_counts_the_decode_workers_that_share_cores(machine: str, expected: int) -> None:
    """Two workers meet the deadlines of all prompts; one worker must defer the longest prompt."""
    infos = [info_of(role[0], role, machine=machine, num_blocks=4096) for role in ROLES]
    router = Router(*infos, limits=SLO_LIMITS)
    for info in infos:
        router(report(info.worker, 500, 5000))
    assert submits(router.arrive(1, 500)) == []
    router.now += 1.0
    for number in range(2, 11):
        assert submits(router.arrive(number, 400)) == []
    ((worker, request, _),) = submits(router(report("p", 100, 5300)))
    assert (worker, request) == ("p", expected)


def test_request_of_a_lost_worker_goes_first_once_another_has_capacity() -> None:
    router = router_of(M, N)
    for number in range(1, 4):
        router.arrive(number, 400)
    assert submits(router(WorkerLost("m"))) == []
    assert submits(router(report("n", 100, 5300))) == [("n", 1, 2)], "requeued requests go first"


def test_recently_lost_worker_is_used_if_no_other_has_capacity() -> None:
    """The penalty after a loss does not matter if no other worker has prefill capacity."""
    router = router_of(M, N)
    router(WorkerLost("m"))
    router(WorkerUp(M))
    assert submits(router.arrive(1, 400)) == [("n", 1, 1)]
    assert submits(router.arrive(2, 400)) == [("m", 2, 1)]


@pytest.mark.parametrize("trouble", ["gone", "rejected"])
def test_worker_whose_only_prompt_is_gone_has_capacity(trouble: str) -> None:
    router = router_of(M)
    router.arrive(1, 400)
    if trouble == "gone":
        router(ClientDisconnected(1))
    else:
        router(Rejected("m", 1, 1, "full"))
        assert submits(router.wait(2.5, "m")) == [("m", 1, 2)]
        return
    assert submits(router.arrive(2, 400)) == [("m", 2, 1)]


def test_kv_transfer_needs_no_prefill_capacity_at_its_destination() -> None:
    """A KV transfer needs no prefill capacity, so it can go to a worker that computes prompts."""
    router = router_of(M, N)
    router.arrive(1, 400)
    router.step("m", 1, 0)
    router.arrive(2, 400)
    assert router.dispatcher.num_queued == 0
    router(WorkerUp(info_of("p", "prefill")))
    assert router.dispatcher.num_queued == 0
