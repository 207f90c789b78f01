import math

import pytest

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.dispatcher import DispatcherLimits
from penstock.router.routing.events import (
    AssignWaiting,
    ClientDisconnected,
    Deliver,
    DeliverEnd,
    Draining,
    Drop,
    EndRequest,
    Event,
    Failed,
    Finish,
    Ready,
    Received,
    Rejected,
    Send,
    Status,
    Stepped,
    Submit,
    Tick,
    TokenColumns,
    WorkerLost,
    WorkerUp,
    Yield,
    Yielded,
)
from penstock.router.routing.request_state import Phase
from penstock.router.routing.request_table import MAX_ASSIGNED, MAX_EXPIRED
from tests.support.columns import NewToken, columns_of
from tests.support.router_harness import AT, D, E, M, P, Router, ends, submits
from tests.support.router_world import info_of

# ------------------------------------------------------------------ prefill and decode pools


def test_a_request_goes_through_both_pools() -> None:
    router = Router(P, D)
    (submit,) = router.arrive()
    assert isinstance(submit, Submit)
    assert (submit.worker, submit.attempt, submit.yield_after) == ("p", 1, 1)
    assert [type(c) for c in router.step("p", 1, 0)] == [Deliver]
    (submit,) = router(Yielded("p", 1, 1, 3))
    assert isinstance(submit, Submit)
    assert (submit.worker, submit.attempt, submit.yield_after) == ("d", 2, 0)
    assert submit.source is not None
    assert router(Ready("d", 1, 2, 4, 0, AT)) == [Send("p", 1, 1, AT, 2, 4, 0)]
    assert router(Received("d", 1, 2, 4)) == [Drop("p", 1, 1)]
    assert [worker.num_requests for worker in router.dispatcher.workers()] == [0, 1]
    commands = router.step("d", 2, 1, Finish.LENGTH)
    assert ends(commands) == [(1, Status.OK)]
    assert router.dispatcher.counters.num_transfers == 1
    assert router.dispatcher.num_requests == 0
    assert [worker.num_requests for worker in router.dispatcher.workers()] == [0, 0]


def test_capacity_of_the_decode_target_is_reserved_from_the_start() -> None:
    tight = info_of("d", "decode", max_sequences=1)
    router = Router(P, tight)
    assert submits(router.arrive(1)) == [("p", 1, 1)]
    assert router.arrive(2) == []
    assert router.dispatcher.num_queued == 1
    assert submits(router(ClientDisconnected(1))) == [("p", 2, 1)]


def test_decode_target_is_kept_even_if_another_worker_has_more_room() -> None:
    router = Router(P, D)
    router.arrive()
    router.step("p", 1, 0)
    router(Stepped("d", TokenColumns(), WorkerLoad(running=3)))
    router(WorkerUp(E))
    assert submits(router(Yielded("p", 1, 1, 0))) == [("d", 1, 2)]


@pytest.mark.parametrize("trouble", ["suspect", "draining"])
def test_suspect_or_draining_decode_target_is_replaced(trouble: str) -> None:
    router = Router(P, D, E)
    router.arrive()
    router.step("p", 1, 0)
    commands = router(Draining("d")) if trouble == "draining" else router.wait(2.5, "p", "e")
    assert commands == []
    assert submits(router(Yielded("p", 1, 1, 3))) == [("e", 1, 2)]


def test_request_that_yields_before_any_work_is_placed_again() -> None:
    router = Router(P, D)
    router.arrive()
    router(WorkerUp(info_of("q", "prefill")))
    assert router(Draining("p")) == [Yield("p", 1, 1)]
    assert submits(router(Yielded("p", 1, 1, 0))) == [("q", 1, 2)]


def test_lost_decode_target_is_replaced() -> None:
    router = Router(P, D, E)
    router.arrive()
    router(WorkerLost("d"))
    router.step("p", 1, 0)
    assert submits(router(Yielded("p", 1, 1, 3))) == [("e", 1, 2)]


def test_prefill_worker_continues_if_no_decode_worker_is_left() -> None:
    router = Router(P, D)
    router.arrive()
    router.step("p", 1, 0)
    router(WorkerLost("d"))
    commands = router(Yielded("p", 1, 1, 3))
    assert commands[0] == Drop("p", 1, 1)
    assert submits(commands) == [("p", 1, 2)]


def test_request_keeps_its_lease_while_the_decode_pool_is_full() -> None:
    tight = info_of("d", "decode", max_sequences=1)
    router = Router(P, D)
    router.arrive(1)
    router.step("p", 1, 0)
    router(WorkerLost("d"))
    router(WorkerUp(tight))
    # Request 2 reserves the only sequence slot of d.
    assert submits(router.arrive(2)) == [("p", 2, 1)]
    assert router(Yielded("p", 1, 1, 3)) == []
    assert router.dispatcher.phases() == {Phase.YIELDED: 1, Phase.RUNNING: 1}
    (drop, _, submit) = router(ClientDisconnected(2))
    assert drop == Drop("p", 2, 1)
    assert isinstance(submit, Submit)
    assert (submit.worker, submit.source is not None) == ("d", True)


# ------------------------------------------------------------------ ended and unknown requests


def test_events_of_an_ended_request_only_drop_what_they_offer() -> None:
    router = Router(P, D)
    router.arrive()
    router.step("p", 1, 0, Finish.STOP)
    assert router(Yielded("p", 1, 1, 3)) == [Drop("p", 1, 1)]
    assert router(Ready("d", 1, 2, 4, 0, AT)) == [Drop("d", 1, 2)]
    for event in (
        Received("d", 1, 2, 4),
        Failed("d", 1, 2, 4, ""),
        Rejected("d", 1, 2, ""),
        ClientDisconnected(1),
        Stepped("p", columns_of([NewToken(1, 1, 0, 1, 5)]), None, [(1, 1, "nan")]),
    ):
        assert router(event) == []


def test_events_of_a_worker_without_a_stream_are_ignored() -> None:
    router = Router(M)
    router.arrive()
    assert router.step("ghost", 1, 0) == []
    assert router(Yielded("ghost", 9, 1, 3)) == []
    assert router(WorkerLost("ghost")) == []


def test_request_number_must_be_unique() -> None:
    router = Router(M)
    router.arrive()
    with pytest.raises(ValueError, match="request 1 already exists"):
        router.arrive()


def test_request_with_a_complete_log_ends_at_once() -> None:
    router = Router(M)
    commands = router.arrive(log=[[1, 2]], max_tokens=2)
    assert commands == [DeliverEnd(1, 0, 2), EndRequest(1, Status.OK)]
    assert router.dispatcher.num_ended == {Status.OK: 1}


# ------------------------------------------------------------------ the queue


def test_full_queue_refuses_with_a_retry_time() -> None:
    router = Router(limits=DispatcherLimits(max_queued=2))
    assert router.arrive(1) == router.arrive(2) == []
    (end,) = router.arrive(3)
    assert isinstance(end, EndRequest)
    assert (end.status, end.retry_after) == (Status.OVERLOADED, 1.0)
    assert router.dispatcher.num_queued == 2
    assert router.dispatcher.num_queued_tokens == 6
    assert router.dispatcher.num_requests == 2


def test_displaced_request_ends_with_a_retry_time_before_the_new_one_is_queued() -> None:
    router = Router(limits=DispatcherLimits(max_queued=2))
    router.arrive(1, tenant="greedy")
    router.arrive(2, tenant="greedy", num_choices=4)
    (end,) = router.arrive(3, tenant="other")
    assert isinstance(end, EndRequest)
    assert (end.request, end.status, end.retry_after) == (2, Status.OVERLOADED, 1.0)
    assert router.dispatcher.num_queued == router.dispatcher.num_requests == 2
    assert submits(router(WorkerUp(M))) == [("m", 1, 1), ("m", 3, 1)]


@pytest.mark.parametrize("wide", [{"num_choices": 8}, {"num_beams": 8}, {"max_tokens": 128}])
def test_choices_beams_and_answer_tokens_count_in_a_tenants_share(wide: dict[str, int]) -> None:
    router = Router(limits=DispatcherLimits(max_queued_cost=200))
    assert router.arrive(1, tenant="narrow") == []
    assert router.arrive(2, tenant="wide", **wide) == []
    assert ends(router.arrive(3, tenant="wide", **wide)) == [(3, Status.OVERLOADED)]
    assert router.arrive(4, tenant="narrow") == []


# ------------------------------------------------------------------ deadlines


def test_request_whose_deadline_has_passed_is_not_queued() -> None:
    router = Router(M)
    commands = router.arrive(1, deadline=router.now)
    assert commands == [EndRequest(1, Status.DEADLINE, "the deadline passed")]
    assert router.dispatcher.num_ended == {Status.DEADLINE: 1}


def test_many_requests_with_one_deadline_are_ended_over_several_events() -> None:
    router, num = Router(), 2 * MAX_EXPIRED
    for request in range(1, num + 1):
        router.arrive(request, deadline=router.now + 1)
    router.now += 2
    assert sorted(handled_in_portions(router, Tick(), MAX_EXPIRED + MAX_ASSIGNED)) == list(
        range(1, num + 1)
    )


def test_requests_that_waited_too_long_are_ended_over_several_events() -> None:
    router = Router(
        info_of("m", "mixed", max_sequences=1), limits=DispatcherLimits(max_wait_seconds=60)
    )
    for request in range(1, 2 * MAX_ASSIGNED + 2):
        router.arrive(request)
    router.now += 61
    step = Stepped("m", columns_of([NewToken(1, 1, 0, 0, 50, Finish.NONE)]))
    ended = handled_in_portions(router, step, MAX_ASSIGNED)
    assert sorted(ended) == list(range(2, 2 * MAX_ASSIGNED + 2))


def handled_in_portions(router: Router, event: Event, most: int) -> list[int]:
    """Handle an event, and return the requests that ended, at most `most` of them at a time."""
    found: list[int] = []
    dispatcher = router.dispatcher
    while True:
        now = [request for request, _ in ends(dispatcher.handle(event, router.now))]
        assert len(now) <= most
        found += now
        if not dispatcher.has_more_to_assign:
            return found
        event = AssignWaiting()


def test_new_worker_gets_queued_requests_over_several_events() -> None:
    router = Router()
    for request in range(1, 3 * MAX_ASSIGNED + 1):
        router.arrive(request)
    event: Event = WorkerUp(info_of("m", "mixed", max_sequences=1000, num_blocks=1000))
    for _ in range(3):
        assert len(submits(router.dispatcher.handle(event, router.now))) == MAX_ASSIGNED
        assert router.dispatcher.has_more_to_assign
        event = AssignWaiting()
    assert not router.dispatcher.handle(event, router.now)
    assert not router.dispatcher.has_more_to_assign


def test_queued_request_is_not_placed_after_its_deadline() -> None:
    """The deadline is checked when the request would be placed, not only at the next tick."""
    router = Router(info_of("m", "mixed", max_sequences=1))
    router.arrive(1)
    router.arrive(2, deadline=router.now + 0.05)
    router.arrive(3)
    router.now += 0.05
    commands = router.step("m", 1, 0, Finish.STOP)
    assert ends(commands) == [(1, Status.OK), (2, Status.DEADLINE)]
    assert submits(commands) == [("m", 3, 1)]


def test_prompt_that_cannot_be_computed_before_its_deadline_is_not_placed() -> None:
    router = Router(M)
    rate = WorkerLoad(num_steps=1, prompt_tokens_computed=10_000, prompt_seconds=10.0)
    router(Stepped("m", TokenColumns(), rate))
    commands = router.arrive(1, num_prompt=500, deadline=router.now + 0.4)
    assert ends(commands) == [(1, Status.DEADLINE)]
    assert not submits(commands)
    assert submits(router.arrive(2, num_prompt=500, deadline=router.now + 0.6)) == [("m", 2, 1)]


def test_request_whose_wait_would_exceed_its_deadline_is_refused_at_once() -> None:
    router = Router(info_of("m", "mixed", max_sequences=1))
    for number in range(1, 41):
        router.arrive(number)
    for number in range(1, 21):  # the worker serves one request per second
        router.now += 1.0
        router.step("m", 1, 0, Finish.STOP, number)
    commands = router.arrive(100, deadline=router.now + 10)
    assert ends(commands) == [(100, Status.OVERLOADED)]
    assert isinstance(commands[0], EndRequest)
    assert commands[0].retry_after == pytest.approx(20.0, rel=0.1)
    assert router.arrive(101, deadline=router.now + 30) == []
    assert router.arrive(102, deadline=router.now + 10, priority=-1) == [], "it goes first"
    assert router.arrive(103, deadline=router.now + 10, tenant="other") == []


@pytest.fixture
def impatient() -> Router:
    """A router with `max_wait_seconds=5`, and a worker that has served one request per second."""
    one_row = info_of("m", "mixed", max_sequences=1)
    router = Router(one_row, limits=DispatcherLimits(max_wait_seconds=5.0))
    router.arrive(1)
    router.arrive(2)
    for number in range(1, 21):
        router.now += 1.0
        router.arrive(number + 2)
        assert submits(router.step("m", 1, 0, Finish.STOP, number)) == [("m", number + 1, 1)]
    return router  # request 21 runs, and request 22 waits


def test_request_that_would_wait_too_long_is_refused_at_once(impatient: Router) -> None:
    accepted = [number for number in range(100, 120) if not impatient.arrive(number)]
    assert accepted == list(range(100, 100 + len(accepted)))
    assert len(accepted) == 5
    assert impatient.arrive(200, tenant="other") == []


def test_queued_request_that_has_waited_too_long_is_refused_with_a_retry_time(
    impatient: Router,
) -> None:
    assert impatient.wait(4.5, "m") == []
    (end,) = impatient.wait(1.0, "m")
    assert isinstance(end, EndRequest)
    assert (end.request, end.status) == (22, Status.OVERLOADED)
    assert end.retry_after is not None
    assert end.retry_after >= 1.0


@pytest.mark.parametrize(("max_wait", "at_router"), [(math.inf, 0), (60.0, 0), (0.6, 2)])
def test_prompts_queue_at_the_router_only_with_a_short_bound(
    max_wait: float, at_router: int
) -> None:
    worker = info_of("m", "mixed", max_sequences=4)
    router = Router(worker, limits=DispatcherLimits(max_wait_seconds=max_wait))
    for number in range(1, 4):
        router.arrive(number)
    assert router.dispatcher.num_queued == at_router


def test_request_may_wait_longer_for_the_first_worker() -> None:
    router = Router(limits=DispatcherLimits(max_wait_seconds=5.0))
    router.arrive(1)
    assert router.wait(20) == []
    assert submits(router(WorkerUp(M))) == [("m", 1, 1)]


def test_requeued_request_may_wait_longer() -> None:
    router = Router(M, limits=DispatcherLimits(max_wait_seconds=5.0))
    router.arrive(1)
    router(WorkerLost("m"))
    router.wait(20)
    assert submits(router(WorkerUp(M))) == [("m", 1, 2)]


def test_tenants_are_charged_for_output_tokens() -> None:
    router = Router(info_of("m", "mixed", max_sequences=1))
    router.arrive(1, tenant="a")
    router.step("m", 1, 0)
    router.arrive(2, num_prompt=1, tenant="b")
    router.arrive(3, num_prompt=1, tenant="a")
    router.arrive(4, num_prompt=1, tenant="b")
    order = []
    for number in (1, 2, 3, 4):
        order += submits(router.step("m", 1, 1 if number == 1 else 0, Finish.STOP, number))
    assert [number for _, number, _ in order] == [2, 4, 3]


def test_queued_request_is_placed_when_a_worker_has_room() -> None:
    router = Router(info_of("m", "mixed", max_sequences=2))
    assert submits(router.arrive(1) + router.arrive(2) + router.arrive(3)) == [
        ("m", 1, 1),
        ("m", 2, 1),
    ]
    assert submits(router.step("m", 1, 0, Finish.STOP, number=2)) == [("m", 3, 1)]


def test_requests_without_workers_end_with_unavailable_after_the_timeout() -> None:
    router = Router(limits=DispatcherLimits(no_worker_timeout_seconds=20.0))
    router.wait(60)
    router.arrive(1)
    router.arrive(2, deadline=router.now + 5)
    assert router.wait(4.5) == []
    assert ends(router.wait(1)) == [(2, Status.UNAVAILABLE)]
    assert router.wait(14) == []
    assert ends(router.wait(1)) == [(1, Status.UNAVAILABLE)]


def test_request_waits_for_a_lost_worker_until_the_timeout() -> None:
    router = Router(M, limits=DispatcherLimits(no_worker_timeout_seconds=20.0))
    router.wait(60, "m")
    router.arrive()
    router(WorkerLost("m"))
    assert router.wait(19.5) == []
    assert ends(router.wait(1)) == [(1, Status.UNAVAILABLE)]


def test_worker_that_connects_in_time_gets_the_queued_request() -> None:
    router = Router()
    router.arrive()
    router.wait(50)
    assert submits(router(WorkerUp(M))) == [("m", 1, 1)]
    assert ends(router.wait(100, "m")) == []


def test_no_worker_timeout_applies_if_all_workers_drain() -> None:
    router = Router(M, limits=DispatcherLimits(no_worker_timeout_seconds=20.0))
    router.arrive(1)
    router.step("m", 1, 0)
    router(Draining("m"))
    assert router.arrive(2) == []
    assert ends(router.wait(21, "m")) == [(2, Status.UNAVAILABLE)]
    assert ends(router.step("m", 1, 1, Finish.STOP)) == [(1, Status.OK)]


def test_deadline_drops_the_request_at_its_worker_and_ends_it() -> None:
    router = Router(M)
    router.arrive(deadline=router.now + 3)
    assert router.wait(2.5, "m") == []
    commands = router.wait(1, "m")
    assert commands == [Drop("m", 1, 1), EndRequest(1, Status.DEADLINE, "the deadline passed")]
