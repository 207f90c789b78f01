from penstock.router.routing.events import (
    Draining,
    WorkerUp,
)
from penstock.router.routing.queue.recovery_throttle import RecoveryThrottle
from tests.support.router_harness import D, P, Router
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
    throttle.discard(0)  # a token has arrived, so request 0 has recovered
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


def test_beam_search_needs_capacity_for_every_beam() -> None:
    router = Router(info_of("m", "mixed", max_sequences=8))
    router.arrive(1)
    router.arrive(2, num_beams=8)
    assert set(router.dispatcher.short_of) == {"prefill", "decode", "mixed"}
