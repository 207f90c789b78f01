"""A worker that answers but does not get on: seen within its bound, and never one that does."""

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
    WorkerUp,
    Yielded,
)
from penstock.router.routing.worker_registry import LivenessBounds
from tests.support.router_harness import AT, D, M, N, P, Router, ends, submits
from tests.support.router_world import info_of

BOUND = 45.0


def hangs(commands: list[Command]) -> list[tuple[str, bool]]:
    return [(each.worker, each.stuck) for each in commands if isinstance(each, CloseStream)]


def test_one_that_beats_and_ends_no_step_is_replaced_and_its_request_goes_on() -> None:
    router = Router(M, N)
    router.arrive()
    router.step("m", 1, 0)
    assert router.wait(BOUND, "m", "n") == []
    commands = router.wait(1, "m", "n")
    assert hangs(commands) == [("m", True)]
    assert submits(commands) == [("n", 1, 2)]


def test_one_that_takes_what_it_is_given_and_never_begins_is_seen_too() -> None:
    router = Router(M, N)
    router.arrive()
    commands = router.wait(BOUND + 1, "m", "n")
    assert (hangs(commands), submits(commands)) == ([("m", True)], [("n", 1, 2)])


def test_so_is_one_that_is_to_take_blocks_and_never_says_ready() -> None:
    router = Router(P, D)
    router.arrive()
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    assert hangs(router.wait(BOUND + 1, "p", "d")) == [("d", True)]


def test_one_that_waits_for_blocks_is_not() -> None:
    router = Router(P, D)
    router.arrive()
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    router(Ready("d", 1, 2, 7, 0, AT))
    assert router.wait(3 * BOUND, "p", "d") == []


def test_nor_is_one_whose_room_is_taken_by_what_it_waits_for() -> None:
    router = Router(P, D)
    for number in (1, 2):
        router.arrive(number)
        router.step("p", 1, 0, number=number)
        router(Yielded("p", number, 1, 3))
    router(Ready("d", 1, 2, 7, 0, AT))
    assert hangs(router.wait(3 * BOUND, "p", "d")) == []
    router(Received("d", 1, 2, 7, 0))
    assert hangs(router.wait(BOUND + 1, "p", "d")) == [("d", True)]


def test_nor_is_one_that_waits_until_a_slow_one_yields() -> None:
    router = Router(M, N)
    router.arrive()
    router.step("m", 1, 0)
    router(Stepped("m", [], WorkerLoad(running=1, num_steps=2, last_step_seconds=10.0)))
    assert submits(router(Draining("m"))) == [("n", 1, 2)]
    router(Ready("n", 1, 2, 7, 0, AT))
    assert hangs(router.wait(199, "m", "n")) == []
    assert hangs(router.wait(2, "m", "n")) == [("m", True)]


def test_its_time_begins_when_it_has_what_another_prepared_for_it() -> None:
    router = Router(P, D)
    router.arrive()
    assert hangs(router.wait(BOUND - 1, "p", "d")) == []  # its place there is kept meanwhile
    router.step("p", 1, 0)
    router(Yielded("p", 1, 1, 3))
    assert hangs(router.wait(BOUND - 2, "p", "d")) == []
    router(Ready("d", 1, 2, 7, 0, AT))
    assert hangs(router.wait(BOUND - 1, "p", "d")) == []
    router(Received("d", 1, 2, 7, 0))
    assert hangs(router.wait(BOUND - 2, "p", "d")) == []
    assert hangs(router.wait(3, "p", "d")) == [("d", True)]


def test_an_idle_one_is_not_however_long_nor_when_work_comes_at_last() -> None:
    router = Router(M)
    assert router.wait(3 * BOUND, "m") == []
    router.arrive()
    assert hangs(router.wait(BOUND - 1, "m")) == []


def test_steps_that_give_this_router_nothing_are_steps() -> None:
    router = Router(M)
    router.arrive()
    for number in range(5):
        router(Stepped("m", [], WorkerLoad(running=2, num_steps=number + 1)))
        assert hangs(router.wait(BOUND - 1, "m")) == []


def test_long_steps_have_a_longer_bound() -> None:
    router = Router(M)
    router(Stepped("m", [], WorkerLoad(running=1, num_steps=1, last_step_seconds=10.0)))
    router.arrive()
    assert hangs(router.wait(199, "m")) == []
    assert hangs(router.wait(2, "m")) == [("m", True)]


def test_a_new_stream_to_it_changes_nothing_until_it_gets_on_or_is_another() -> None:
    router = Router(M)
    router(Stepped("m", [], WorkerLoad(running=1, num_steps=3)))
    router.arrive()
    router.wait(BOUND + 1, "m")
    assert submits(router(WorkerUp(M, WorkerLoad(running=1, num_steps=3)))) == []
    assert router.state("m") == "stuck"
    assert submits(router(Stepped("m", [], WorkerLoad(running=0, num_steps=4)))) == [("m", 1, 2)]
    assert router.state("m") == "ready"


def test_another_incarnation_of_it_is_taken_at_once() -> None:
    router = Router(M)
    router.arrive()
    router.wait(BOUND + 1, "m")
    assert submits(router(WorkerUp(info_of("m", "mixed", "2")))) == [("m", 1, 2)]


def test_with_nobody_else_there_a_request_waits_no_longer_than_for_nobody() -> None:
    router = Router(M, limits=DispatcherLimits(no_worker_timeout_seconds=5.0))
    router.arrive()
    router.wait(BOUND + 1, "m")
    router(WorkerUp(M))
    assert ends(router.wait(6, "m")) == [(1, Status.UNAVAILABLE)]


@given(
    pauses=st.lists(st.floats(0.1, 9.9), min_size=1, max_size=30),
    tokens=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_whoever_ends_a_step_within_the_bound_is_left_alone_and_then_not(
    pauses: list[float], tokens: list[bool]
) -> None:
    router = Router(M, limits=DispatcherLimits(bounds=LivenessBounds(stuck_after=10.5)))
    router.arrive(max_tokens=100)
    position = 0
    for number, (pause, token) in enumerate(zip(pauses, tokens, strict=False)):
        assert hangs(router.wait(pause, "m")) == []
        if token:
            router.step("m", 1, position)
            position += 1
        else:
            router(Stepped("m", [], WorkerLoad(running=1, num_steps=number + 1)))
    assert hangs(router.wait(10.0, "m")) == []
    assert hangs(router.wait(1.5, "m")) == [("m", True)]
