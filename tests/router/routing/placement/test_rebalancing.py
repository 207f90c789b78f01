"""What waits for room at one worker goes to another that has it, and not to and fro."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.events import Command, Drop, Ready, Stepped, Yielded
from penstock.router.routing.placement.rebalancing import (
    BACKOFF_FACTOR,
    INITIAL_SECONDS,
    rebalance_delay,
)
from tests.support.router_harness import AT, D, E, P, Router, submits

FULL = WorkerLoad(queued=1, running=4)
EMPTY = WorkerLoad(free_blocks=64)


def waiting() -> Router:
    """Return a router: request 1 has a lease on p and waits for capacity on d; e is also full."""
    router = Router(P, D, E)
    for worker in "de":
        router(Stepped(worker, [], FULL))
    router.arrive()
    router.step("p", 1, 0)
    assert submits(router(Yielded("p", 1, 1, 3))) == [("d", 1, 2)]
    return router


def told(router: Router, seconds: float, **loads: WorkerLoad) -> list[Command]:
    """Time passes, in which the workers say again and again how they are."""
    commands: list[Command] = []
    for _ in range(round(seconds / 0.5)):
        for worker, load in loads.items():
            steps = round(router.now * 2)  # it gets on
            commands += router(Stepped(worker, [], load._replace(num_steps=steps)))
        commands += router.wait(0.5, "p", "d", "e")
    return commands


def test_it_goes_where_there_is_room_after_a_while() -> None:
    router = waiting()
    assert told(router, INITIAL_SECONDS / 2, d=FULL, e=EMPTY) == []
    commands = told(router, 1.0, d=FULL, e=EMPTY)
    assert commands[0] == Drop("d", 1, 2)
    assert submits(commands) == [("e", 1, 3)]
    assert router.dispatcher.num_rebalanced == 1


@pytest.mark.parametrize(
    ("asked", "other"),
    [
        (FULL, FULL),
        (FULL, WorkerLoad(free_blocks=0)),  # nothing waits there, but it has no blocks either
        (FULL, WorkerLoad(free_blocks=64, queued_tokens=100)),  # a prompt comes first
        (FULL, WorkerLoad(free_blocks=64, running=4)),  # no place
        (EMPTY, EMPTY),  # it has room itself, and is about to say so
    ],
)
def test_it_stays_where_nobody_surely_has_room_sooner(asked: WorkerLoad, other: WorkerLoad) -> None:
    router = waiting()
    assert told(router, 5, d=asked, e=other) == []


def test_what_is_on_its_way_stays_on_it() -> None:
    router = waiting()
    router(Ready("d", 1, 2, 4, 0, AT))
    assert told(router, 5, d=FULL, e=EMPTY) == []


def test_it_is_not_sent_to_and_fro() -> None:
    """Two workers that seem empty exactly when the request is not with them."""
    router = waiting()
    for worker in "edededed":
        other = "d" if worker == "e" else "e"
        loads = {other: FULL, worker: EMPTY}
        begun = router.now
        while not submits(told(router, 0.5, **loads)):
            assert router.now - begun < 300
    assert router.dispatcher.num_rebalanced == 8
    assert router.now - 1000.0 >= sum(rebalance_delay(before) for before in range(8))


@given(st.integers(0, 20))
def test_patience_grows(num_revisions: int) -> None:
    assert rebalance_delay(0) == INITIAL_SECONDS
    assert rebalance_delay(num_revisions + 1) == BACKOFF_FACTOR * rebalance_delay(num_revisions)
