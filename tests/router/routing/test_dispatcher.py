import pytest

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.dispatcher import DispatcherLimits
from penstock.router.routing.events import (
    ClientDisconnected,
    Deliver,
    Draining,
    Drop,
    EndRequest,
    Failed,
    Finish,
    NewToken,
    Ready,
    Received,
    Rejected,
    Send,
    Status,
    Stepped,
    Submit,
    WorkerLost,
    WorkerUp,
    Yield,
    Yielded,
)
from penstock.router.routing.request_state import Phase
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
    router(Stepped("d", [], WorkerLoad(running=3)))
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
    assert submits(router.arrive(2)) == [("p", 2, 1)]  # also reserves the only sequence slot of d
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
        Stepped("p", [NewToken(1, 1, 0, 1, 5)], None, [(1, 1, "nan")]),
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
    assert commands == [Deliver(1, 0, 2, (), (), Finish.LENGTH), EndRequest(1, Status.OK)]
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
    assert router.dispatcher.num_running == 0


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
