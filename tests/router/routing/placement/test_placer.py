import pytest

from penstock.router.routing.events import (
    Draining,
    Drop,
    Finish,
    Ready,
    Received,
    Rejected,
    Send,
    Status,
    Submit,
    WorkerUp,
    Yield,
    Yielded,
)
from penstock.router.routing.placement.placer import RecoveryThrottle
from tests.support.router_harness import AT, D, E, M, N, P, Router, ends, submits
from tests.support.router_world import info_of

# ------------------------------------------------------------------ recovery throttle


def test_number_of_concurrent_recoveries_is_limited_per_worker() -> None:
    throttle = RecoveryThrottle(2)
    for request in range(6):
        throttle.add(request)
    assert throttle.release(0) == []
    assert throttle.release(1) == [0, 1]
    assert throttle.release(1) == []
    assert throttle.release(2) == [2, 3]
    assert len(throttle) == 2
    assert 4 in throttle
    throttle.discard(0)  # request 0 has recovered: a token has arrived
    assert throttle.release(2) == [4]


def test_request_lost_again_during_recovery_is_counted_once() -> None:
    throttle = RecoveryThrottle(1)
    throttle.add(1)
    assert throttle.release(1) == [1]
    throttle.add(1)
    throttle.add(2)
    assert throttle.release(1) == [1]
    throttle.discard(1)
    assert throttle.release(1) == [2]


def test_request_that_ends_while_throttled_is_forgotten() -> None:
    throttle = RecoveryThrottle(1)
    throttle.add(1)
    throttle.discard(1)
    assert throttle.release(1) == []


# ------------------------------------------------------------------ roles without capacity


def test_queue_is_short_of_the_roles_without_capacity() -> None:
    router = Router()
    assert set(router.dispatcher.short_of) == set(), "no request is queued"
    router.arrive(1)
    assert set(router.dispatcher.short_of) == {"prefill", "decode", "mixed"}
    router = Router(P, D)
    router(Draining("d"))
    router(Draining("p"))
    router.arrive(1)
    router(WorkerUp(P))
    assert set(router.dispatcher.short_of) == set(), "the new prefill worker took the request"
    router = Router(P, info_of("d", "decode", max_sequences=1))
    router.arrive(1)
    router.arrive(2)
    assert set(router.dispatcher.short_of) == {"decode", "mixed"}


def test_beam_search_needs_room_for_every_beam() -> None:
    router = Router(info_of("m", "mixed", max_sequences=8))
    router.arrive(1)
    router.arrive(2, num_beams=8)
    assert set(router.dispatcher.short_of) == {"prefill", "decode", "mixed"}


# ------------------------------------------------------------------ draining


def test_draining_worker_gets_no_requests_and_its_running_ones_move() -> None:
    router = Router(D)
    router.arrive(1)
    router.step("d", 1, 0)
    assert router(Draining("d")) == []  # no other worker: the request stays on d
    assert router.state("d") == "draining"
    commands = router(WorkerUp(E)) + router.wait(0.5, "d", "e")
    assert submits(commands) == [("e", 1, 2)]
    assert router.wait(1, "d", "e") == []  # the request is submitted only once
    assert router(Ready("e", 1, 2, 4, 0, AT)) == [Yield("d", 1, 1)]
    commands = router(Yielded("d", 1, 1, 3))
    assert commands[0] == Drop("e", 1, 2)
    assert submits(commands) == [("e", 1, 3)]
    assert router(Ready("e", 1, 3, 5, 0, AT)) == [Send("d", 1, 1, AT, 3, 5, 0)]
    assert router(Received("e", 1, 3, 5)) == [Drop("d", 1, 1)]
    assert submits(router.arrive(2)) == [("e", 2, 1)]


def test_permanent_rejection_by_a_migration_target_does_not_end_the_request() -> None:
    router = Router(D)
    router.arrive()
    router.step("d", 1, 0)
    router(WorkerUp(E))
    assert submits(router(Draining("d"))) == [("e", 1, 2)]
    assert router(Rejected("e", 1, 2, "too long", is_permanent=True)) == []
    assert router.wait(1, "d", "e") == []
    assert ends(router.step("d", 1, 1, Finish.STOP)) == [(1, Status.OK)]


def test_request_not_started_on_a_draining_worker_yields_at_once() -> None:
    router = Router(M)
    router.arrive()
    router(WorkerUp(N))
    assert router(Draining("m")) == [Yield("m", 1, 1)]
    assert submits(router(Yielded("m", 1, 1, 0))) == [("n", 1, 2)]


def test_request_whose_blocks_cannot_be_transferred_yields_at_once() -> None:
    router = Router(M)
    router.arrive()
    router.step("m", 1, 0)
    router(WorkerUp(info_of("n", "mixed", layout="other")))
    assert router(Draining("m")) == [Yield("m", 1, 1)]
    commands = router(Yielded("m", 1, 1, 3))
    assert commands[0] == Drop("m", 1, 1)
    assert submits(commands) == [("n", 1, 2)]


def test_several_choices_move_together_and_are_recomputed() -> None:
    router = Router(M)
    router.arrive(num_choices=2)
    router.step("m", 1, 0)
    router(WorkerUp(N))
    assert router(Draining("m")) == [Yield("m", 1, 1)]
    (submit,) = router(Yielded("m", 1, 1, 0))
    assert isinstance(submit, Submit)
    assert (submit.worker, submit.log) == ("n", ((50,), ()))


@pytest.mark.parametrize("trouble", ["draining", "suspect"])
def test_request_waiting_for_a_suspect_or_draining_worker_is_withdrawn(trouble: str) -> None:
    router = Router(P, D, E)
    router.arrive()
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    commands = router(Draining("d")) if trouble == "draining" else router.wait(2.5, "p", "e")
    assert commands[0] == Drop("d", 1, 2)
    assert submits(commands) == [("e", 1, 3)]


def test_started_transfer_to_a_draining_worker_completes() -> None:
    router = Router(P, D, E)
    router.arrive()
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    router(Ready("d", 1, 2, 4, 0, AT))
    assert router(Draining("d")) == []
    assert router(Received("d", 1, 2, 4)) == [Drop("p", 1, 1)]
    router.step("d", 2, 1)
    assert submits(router.wait(0.5, "p", "d", "e")) == [("e", 1, 3)]  # then the request moves to e


def test_decode_target_that_drains_during_prefill_is_replaced() -> None:
    router = Router(P, D, E)
    router.arrive()
    router(Draining("d"))
    router.step("p", 1, 0)
    assert submits(router(Yielded("p", 1, 1, 3))) == [("e", 1, 2)]
