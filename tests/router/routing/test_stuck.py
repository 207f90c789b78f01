"""Workers that send heartbeats but complete no step are detected; other workers are not."""

import hypothesis.strategies as st
from hypothesis import given

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.dispatcher import DispatcherLimits
from penstock.router.routing.events import (
    CloseStream,
    Command,
    Draining,
    Ready,
    Received,
    Status,
    Stepped,
    Tick,
    TokenColumns,
    WorkerUp,
    Yielded,
)
from penstock.router.routing.prefix_cache.cache_events import CacheChange, CacheEvents
from penstock.router.routing.worker_registry import LivenessBounds
from tests.support.router_harness import AT, D, M, N, P, Router, ends, submits
from tests.support.router_world import info_of

STUCK_SECONDS = 45.0


def closed_streams(commands: list[Command]) -> list[tuple[str, bool]]:
    return [(each.worker, each.stuck) for each in commands if isinstance(each, CloseStream)]


def test_worker_that_completes_no_step_is_closed_and_its_request_moves() -> None:
    router = Router(M, N)
    router.arrive()
    router.step("m", 1, 0)
    assert router.wait(STUCK_SECONDS, "m", "n") == []
    commands = router.wait(1, "m", "n")
    assert closed_streams(commands) == [("m", True)]
    assert submits(commands) == [("n", 1, 2)]


def test_worker_that_never_starts_its_request_is_stuck() -> None:
    router = Router(M, N)
    router.arrive()
    commands = router.wait(STUCK_SECONDS + 1, "m", "n")
    assert (closed_streams(commands), submits(commands)) == ([("m", True)], [("n", 1, 2)])


def test_worker_that_never_sends_ready_for_a_transfer_is_stuck() -> None:
    router = Router(P, D)
    router.arrive()
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    assert closed_streams(router.wait(STUCK_SECONDS + 1, "p", "d")) == [("d", True)]


def test_worker_that_waits_for_a_transfer_is_not_stuck() -> None:
    router = Router(P, D)
    router.arrive()
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    router(Ready("d", 1, 2, 7, 0, AT))
    assert router.wait(3 * STUCK_SECONDS, "p", "d") == []


def test_worker_whose_room_is_reserved_for_a_transfer_is_not_stuck() -> None:
    router = Router(P, D)
    for number in (1, 2):
        router.arrive(number)
        router.step("p", 1, 0, number=number)
        router(Yielded("p", number, 1, 3))
    router(Ready("d", 1, 2, 7, 0, AT))
    assert closed_streams(router.wait(3 * STUCK_SECONDS, "p", "d")) == []
    router(Received("d", 1, 2, 7, 0))
    assert closed_streams(router.wait(STUCK_SECONDS + 1, "p", "d")) == [("d", True)]


def test_worker_that_waits_for_a_slow_one_to_yield_is_not_stuck() -> None:
    router = Router(M, N)
    router.arrive()
    router.step("m", 1, 0)
    router(Stepped("m", TokenColumns(), WorkerLoad(running=1, num_steps=2, last_step_seconds=10.0)))
    assert submits(router(Draining("m"))) == [("n", 1, 2)]
    router(Ready("n", 1, 2, 7, 0, AT))
    assert closed_streams(router.wait(199, "m", "n")) == []
    assert closed_streams(router.wait(2, "m", "n")) == [("m", True)]


def test_stuck_time_of_a_decode_worker_restarts_with_each_stage_of_a_transfer() -> None:
    router = Router(P, D)
    router.arrive()
    # Until now, d has only reserved capacity, so it is not stuck.
    assert closed_streams(router.wait(STUCK_SECONDS - 1, "p", "d")) == []
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    assert closed_streams(router.wait(STUCK_SECONDS - 2, "p", "d")) == []
    router(Ready("d", 1, 2, 7, 0, AT))
    assert closed_streams(router.wait(STUCK_SECONDS - 1, "p", "d")) == []
    router(Received("d", 1, 2, 7, 0))
    assert closed_streams(router.wait(STUCK_SECONDS - 2, "p", "d")) == []
    assert closed_streams(router.wait(3, "p", "d")) == [("d", True)]


def test_idle_worker_is_not_stuck_even_just_after_new_work() -> None:
    router = Router(M)
    assert router.wait(3 * STUCK_SECONDS, "m") == []
    router.arrive()
    assert closed_streams(router.wait(STUCK_SECONDS - 1, "m")) == []


def test_steps_without_tokens_for_this_router_count_as_progress() -> None:
    router = Router(M)
    router.arrive()
    for number in range(5):
        router(Stepped("m", TokenColumns(), WorkerLoad(running=2, num_steps=number + 1)))
        assert closed_streams(router.wait(STUCK_SECONDS - 1, "m")) == []


def test_worker_with_long_steps_has_a_longer_timeout() -> None:
    router = Router(M)
    router(Stepped("m", TokenColumns(), WorkerLoad(running=1, num_steps=1, last_step_seconds=10.0)))
    router.arrive()
    assert closed_streams(router.wait(199, "m")) == []
    assert closed_streams(router.wait(2, "m")) == [("m", True)]


def test_stuck_worker_that_reconnects_is_used_only_after_a_completed_step() -> None:
    router = Router(M)
    router(Stepped("m", TokenColumns(), WorkerLoad(running=1, num_steps=3)))
    router.arrive()
    router.wait(STUCK_SECONDS + 1, "m")
    assert submits(router(WorkerUp(M, WorkerLoad(running=1, num_steps=3)))) == []
    assert router.state("m") == "stuck"
    assert submits(router(Stepped("m", TokenColumns(), WorkerLoad(running=0, num_steps=4)))) == [
        ("m", 1, 2)
    ]
    assert router.state("m") == "ready"


def test_new_incarnation_of_a_stuck_worker_is_used_at_once() -> None:
    router = Router(M)
    router.arrive()
    router.wait(STUCK_SECONDS + 1, "m")
    assert submits(router(WorkerUp(info_of("m", "mixed", "2")))) == [("m", 1, 2)]


def test_stuck_worker_does_not_extend_the_no_worker_timeout() -> None:
    router = Router(M, limits=DispatcherLimits(no_worker_timeout_seconds=5.0))
    router.arrive()
    router.wait(STUCK_SECONDS + 1, "m")
    router(WorkerUp(M))
    assert ends(router.wait(6, "m")) == [(1, Status.UNAVAILABLE)]


@given(
    pauses=st.lists(st.floats(0.1, 9.9), min_size=1, max_size=30),
    tokens=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_worker_is_stuck_only_after_the_timeout_without_a_step(
    pauses: list[float], tokens: list[bool]
) -> None:
    router = Router(M, limits=DispatcherLimits(bounds=LivenessBounds(stuck_after=10.5)))
    router.arrive(max_tokens=100)
    position = 0
    for number, (pause, token) in enumerate(zip(pauses, tokens, strict=False)):
        assert closed_streams(router.wait(pause, "m")) == []
        if token:
            router.step("m", 1, position)
            position += 1
        else:
            router(Stepped("m", TokenColumns(), WorkerLoad(running=1, num_steps=number + 1)))
    assert closed_streams(router.wait(10.0, "m")) == []
    assert closed_streams(router.wait(1.5, "m")) == [("m", True)]


def test_last_worker_is_closed_as_stuck_although_it_has_the_prompt_of_a_queued_request() -> None:
    router = Router(M)
    hashes, size = [11, 12, 13], M.block_size
    change = CacheChange(stored=hashes, parents=[0], lengths=[3])
    router(CacheEvents("m", M.incarnation, 0, [change]))
    for number in range(1, M.max_sequences + 2):
        router.arrive(number, num_prompt=3 * size + 1, prompt_hashes={size: hashes})
    assert router.dispatcher.num_queued == 1
    assert closed_streams(router.wait(STUCK_SECONDS + 1, "m")) == [("m", True)]
    # The prefix index keeps the worker's blocks until the event WorkerLost.
    assert router.dispatcher.prefix_index.num_blocks("m") == 3
    router(Tick())
    assert submits(router.arrive(99, num_prompt=3 * size + 1, prompt_hashes={size: hashes})) == []
