"""The promised order: as many first tokens in time as can be, priorities, tenants, nobody left for
ever; prompts that wait at the router until a worker has time."""

from itertools import permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.dispatcher import DispatcherLimits
from penstock.router.routing.events import (
    ClientDisconnected,
    Rejected,
    Stepped,
    WorkerInfo,
    WorkerLost,
    WorkerUp,
)
from penstock.router.routing.queue.fair_queue import FairQueue, QueuedRequest
from penstock.router.routing.queue.slo_order import (
    STARVATION_FACTOR,
    STARVATION_INTERVAL,
    PrefillCapacity,
    QueuedPrompt,
    moore_hodgson,
    prefill_capacity,
)
from penstock.router.routing.worker_registry import WorkerView
from tests.support.router_harness import Router, submits
from tests.support.router_world import info_of

PROMISED = 2.0
ONE = PrefillCapacity(workers=1.0, seconds_per_token=0.001)


# ------------------------------------------------------------------ the order


def num_kept(waits: list[QueuedPrompt], now: float, workers: float) -> int:
    """Of those that are begun in this order, by one that is as fast as all workers together."""
    kept = 0
    for each in waits:
        kept += now <= each.due(PROMISED) - each.seconds
        now += each.seconds / workers
    return kept


def served(waits: list[QueuedPrompt], now: float, workers: float) -> list[QueuedPrompt]:
    """All of them, one after the other, as the line would have it."""
    left, order = list(waits), []
    while left:
        order.append(left.pop(moore_hodgson(left, now, PROMISED, workers)))
        now += order[-1].seconds / workers
    return order


# Sixteenths of a second: sums of them are exact, so that "just in time" means the same to all.
times = st.integers(0, 64).map(lambda value: value / 16)
lengths = st.integers(1, 40).map(lambda value: value / 16)
crowds = st.lists(st.builds(QueuedPrompt, times, lengths), max_size=6).map(
    lambda waits: sorted(waits, key=lambda each: each.arrived_at)
)
crews = st.sampled_from([0.5, 1.0, 2.0, 8.0])


@given(crowds, crews)
def test_no_order_keeps_more_promises(waits: list[QueuedPrompt], workers: float) -> None:
    best = max(num_kept(list(order), 4.0, workers) for order in permutations(waits))
    assert num_kept(served(waits, 4.0, workers), 4.0, workers) == best


@given(crowds, crews)
def test_who_is_next_is_in_time_if_anybody_can_be(
    waits: list[QueuedPrompt], workers: float
) -> None:
    able = [each for each in waits if 4.0 + each.seconds <= each.due(PROMISED)]
    if waits:
        place = moore_hodgson(waits, 4.0, PROMISED, workers)
        assert waits[place] in able if able else place == 0


@given(crowds)
def test_by_when_each_is_due_where_that_keeps_all_promises(waits: list[QueuedPrompt]) -> None:
    in_order = sorted(waits, key=lambda each: each.due(PROMISED))
    if num_kept(in_order, 4.0, 1.0) == len(waits):
        due = [each.due(PROMISED) for each in served(waits, 4.0, 1.0)]
        assert due == sorted(due)


@given(crowds, st.integers(2, 9))
def test_more_workers_never_keep_fewer_promises(waits: list[QueuedPrompt], more: int) -> None:
    few, many = (num_kept(served(waits, 4.0, n), 4.0, n) for n in (1.0, float(more)))
    assert few <= many


# ------------------------------------------------------------------ in the line


def line_of(*entries: QueuedRequest) -> FairQueue:
    queue = FairQueue(1000, 10**9, PROMISED)
    for each in entries:
        queue.add(each)
    return queue


def entry(number: int, tokens: int = 1000, since: float = 0.0, **fields: object) -> QueuedRequest:
    known = {"tenant": "", "priority": 0, **fields}
    return QueuedRequest(number, num_tokens=tokens, arrived_at=since, **known)  # type: ignore[arg-type]


def take(queue: FairQueue, now: float, crew: PrefillCapacity = ONE) -> int | None:
    request = queue.select(now, crew)
    if request is not None:
        queue.dequeue(request, now)
        queue.check()
    return request


def test_equal_prompts_that_all_keep_theirs_go_by_arrival() -> None:
    queue = line_of(*(entry(number, 100) for number in range(3)))
    assert [take(queue, 0.0) for _ in range(3)] == [0, 1, 2]


def test_a_long_prompt_stands_back_for_many_short_ones() -> None:
    queue = line_of(entry(0, 3000), *(entry(number, 60) for number in range(1, 40)))
    assert [take(queue, 0.0) for _ in range(40)] == [*range(1, 40), 0]


def test_with_workers_enough_it_does_not() -> None:
    queue = line_of(entry(0, 3000), *(entry(number, 60) for number in range(1, 40)))
    order = [take(queue, 0.0, PrefillCapacity(4.0, 0.001)) for _ in range(40)]
    assert order[-1] == 0, "it is due last"
    late = line_of(entry(0, 3000), *(entry(number, 60, since=9.8) for number in range(1, 40)))
    assert take(late, 9.8, PrefillCapacity(4.0, 0.001)) == 0


def test_what_is_late_already_goes_last() -> None:
    queue = line_of(entry(0, 100), entry(1, 100, since=PROMISED + 1))
    assert [take(queue, PROMISED + 1) for _ in range(2)] == [1, 0]


def test_before_anything_is_known_of_their_pace_it_goes_by_arrival() -> None:
    queue = line_of(*(entry(number, 1000 - number) for number in range(3)))
    assert [take(queue, 0.0, PrefillCapacity(1.0, 0.0)) for _ in range(3)] == [0, 1, 2]


def test_priorities_come_first_and_who_was_placed_before_leads_its_tenants_line() -> None:
    entries = entry(0), entry(1, is_requeued=True), entry(2, 9000, priority=1), entry(3, 10)
    queue = line_of(*entries)
    assert [take(queue, 60.0) for _ in range(4)] == [2, 1, 0, 3]


def test_who_has_waited_for_long_gets_a_turn_however_many_come() -> None:
    queue, now = line_of(entry(-1, 3000)), 0.0
    for number in range(0, 400, 2):
        # Twice as much arrives as can be computed, so there is always somebody who can be in time.
        queue.add(entry(number, 500, now))
        queue.add(entry(number + 1, 400, now))
        now += 0.5
        if take(queue, now) == -1:
            break
    assert (
        STARVATION_FACTOR * PROMISED
        < now
        <= STARVATION_FACTOR * PROMISED + 0.5 * (STARVATION_INTERVAL + 1)
    )


def test_while_nobody_has_time_only_what_was_placed_before_may_go() -> None:
    queue = line_of(entry(0))
    assert queue.select(0.0, None) is None
    queue.add(entry(1, is_requeued=True))
    assert queue.select(0.0, None) == 1


requests = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(0, 2), st.integers(1, 5000), st.booleans()),
    max_size=30,
)


@given(requests, st.floats(0, 60), st.sampled_from([0.3, 1.0, 7.0]))
def test_bands_and_tenants_have_their_turns_as_without_promises(
    asked: list[tuple[str, int, int, bool]], now: float, workers: float
) -> None:
    """Whatever the order within a tenant's line, the tenant that is next is the same."""
    plain, promised = FairQueue(99, 10**9), FairQueue(99, 10**9, PROMISED)
    entries = {
        number: entry(number, tokens, tenant=tenant, priority=priority, is_requeued=again)
        for number, (tenant, priority, tokens, again) in enumerate(asked)
    }
    for queue in (plain, promised):
        for each in entries.values():
            queue.add(each)
    while (chosen := promised.select(now, PrefillCapacity(workers, 0.001))) is not None:
        head = plain.head()
        assert head is not None
        assert entries[head].priority == entries[chosen].priority
        assert entries[head].tenant == entries[chosen].tenant
        assert entries[head].is_requeued == entries[chosen].is_requeued
        for queue in (plain, promised):  # the same tenant pays the same
            queue.dequeue(chosen, now)
            queue.check()
    assert plain.head() is None, "everyone went"


# ------------------------------------------------------------------ who has time


def reporting(view: WorkerView, **load: Any) -> WorkerView:
    """It has computed a thousand tokens a second, in steps of a tenth."""
    speed = WorkerLoad(last_step_seconds=0.1, prompt_tokens_computed=10_000, prompt_seconds=10.0)
    view.update_load(speed._replace(**load), 0.0)
    return view


def view_of(name: str, role: str = "mixed") -> WorkerView:
    return WorkerView(info_of(name, role), WorkerLoad(), 0.0, float("-inf"), queues_at_router=True)


def test_a_worker_is_given_the_step_under_way_and_the_next() -> None:
    assert reporting(view_of("m"), queued_tokens=199).has_prefill_slot
    assert not reporting(view_of("m"), queued_tokens=200).has_prefill_slot


def test_one_of_which_nothing_is_known_is_given_one_prompt_at_a_time() -> None:
    view = view_of("m")
    assert view.has_prefill_slot
    view.note_assigned(5, 1)
    assert not view.has_prefill_slot


def test_what_came_during_a_step_is_counted_until_a_report_has_it() -> None:
    view = reporting(view_of("m"))
    view.set_usage(1, view.resource_usage(1000, 1))
    view.note_assigned(1000, 1)
    assert not reporting(view).has_prefill_slot, "that step had begun before it came"
    assert reporting(view, running=1, queued_tokens=150).has_prefill_slot


def test_those_who_compute_prompts_share_what_waits() -> None:
    views = [reporting(view_of(name)) for name in "mn"]
    assert prefill_capacity(views) == PrefillCapacity(2, 0.001)
    for view in views:
        view.note_assigned(500, 1)
    assert prefill_capacity(views) is None
    views.append(reporting(view_of("d", "decode")))
    assert prefill_capacity(views) == PrefillCapacity(2, 0.001), "a decode worker may help out"


def test_what_is_found_in_the_cache_is_not_computed() -> None:
    view = view_of("m")
    half = WorkerLoad(
        last_step_seconds=0.1,
        prompt_tokens_computed=5000,
        prompt_tokens_cached=5000,
        prompt_seconds=5.0,
    )
    view.update_load(half, 0.0)
    assert prefill_capacity([view]) == PrefillCapacity(1, 0.0005)


# ------------------------------------------------------------------ in the router

PROMISING = DispatcherLimits(ttft_slo_seconds=PROMISED)
M, N = (info_of(name, "mixed", num_blocks=4096) for name in "mn")


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
    return Stepped(worker, (), load)


def router_of(*infos: WorkerInfo) -> Router:
    """Its workers have computed a thousand tokens a second."""
    router = Router(*infos, limits=PROMISING)
    for info in infos:
        router(report(info.worker, 0, 5000, running=0))
    return router


def test_prompts_wait_at_the_router_and_the_best_goes_to_who_has_time_first() -> None:
    router = router_of(M, N)
    placed = [submits(router.arrive(number, 400)) for number in range(1, 4)]
    assert placed == [[("m", 1, 1)], [("n", 2, 1)], []]
    router.arrive(4, 10)
    assert router.dispatcher.num_queued == 2
    assert router.dispatcher.num_queued_tokens == 410
    assert set(router.dispatcher.short_of) == {"prefill", "decode", "mixed"}
    assert submits(router(report("m", 300, 5100))) == []
    assert submits(router(report("n", 195, 5250))) == [("n", 4, 1)], "it is due first"
    assert submits(router(report("m", 100, 5300))) == [("m", 3, 1)]
    assert set(router.dispatcher.short_of) == set()


def test_what_is_lost_goes_on_where_there_is_time() -> None:
    router = router_of(M, N)
    for number in range(1, 4):
        router.arrive(number, 400)
    assert submits(router(WorkerLost("m"))) == []
    assert submits(router(report("n", 100, 5300))) == [("n", 1, 2)], "ahead of its line"


def test_one_that_was_lost_a_moment_ago_is_given_what_no_other_has_time_for() -> None:
    """It is liked less than who has little to do; who has enough to do is not asked."""
    router = router_of(M, N)
    router(WorkerLost("m"))
    router(WorkerUp(M))
    assert submits(router.arrive(1, 400)) == [("n", 1, 1)]
    assert submits(router.arrive(2, 400)) == [("m", 2, 1)]


@pytest.mark.parametrize("trouble", ["gone", "rejected"])
def test_an_idle_worker_whose_only_prompt_is_gone_has_time(trouble: str) -> None:
    router = router_of(M)
    router.arrive(1, 400)
    if trouble == "gone":
        router(ClientDisconnected(1))
    else:
        router(Rejected("m", 1, 1, "full"))
        assert submits(router.wait(2.5, "m")) == [("m", 1, 2)]
        return
    assert submits(router.arrive(2, 400)) == [("m", 2, 1)]


def test_a_decode_worker_does_not_wait_for_what_it_need_not_compute() -> None:
    """A KV transfer goes to a worker that has prompts to compute."""
    router = router_of(M, N)
    router.arrive(1, 400)
    router.step("m", 1, 0)
    router.arrive(2, 400)
    assert router.dispatcher.num_queued == 0
    router(WorkerUp(info_of("p", "prefill")))
    assert router.dispatcher.num_queued == 0
