"""A request that waits for capacity moves to a worker with capacity, without oscillating."""

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
    """Return a router: request 1 has a lease on p and waits for capacity on d; e is full, too."""
    router = Router(P, D, E)
    for worker in "de":
        router(Stepped(worker, [], FULL))
    router.arrive()
    router.step("p", 1, 0)
    assert submits(router(Yielded("p", 1, 1, 3))) == [("d", 1, 2)]
    return router


def advance(router: Router, seconds: float, **loads: WorkerLoad) -> list[Command]:
    """Advance time while the workers in `loads` repeatedly report these loads."""
    commands: list[Command] = []
    for _ in range(round(seconds / 0.5)):
        for worker, load in loads.items():
            steps = round(router.now * 2)  # a growing step count shows progress
            commands += router(Stepped(worker, [], load._replace(num_steps=steps)))
        commands += router.wait(0.5, "p", "d", "e")
    return commands


def test_waiting_request_moves_to_a_worker_with_room_after_a_delay() -> None:
    router = waiting()
    assert advance(router, INITIAL_SECONDS / 2, d=FULL, e=EMPTY) == []
    commands = advance(router, 1.0, d=FULL, e=EMPTY)
    assert commands[0] == Drop("d", 1, 2)
    assert submits(commands) == [("e", 1, 3)]
    assert router.dispatcher.num_rebalanced == 1


@pytest.mark.parametrize(
    ("current", "other"),
    [
        (FULL, FULL),
        (FULL, WorkerLoad(free_blocks=0)),  # no queue, but no free blocks
        (FULL, WorkerLoad(free_blocks=64, queued_tokens=100)),  # a prompt queued there goes first
        (FULL, WorkerLoad(free_blocks=64, running=4)),  # no free slot for a sequence
        (EMPTY, EMPTY),  # the current worker has capacity and will send Ready
    ],
)
def test_waiting_request_stays_unless_another_worker_surely_has_room(
    current: WorkerLoad, other: WorkerLoad
) -> None:
    router = waiting()
    assert advance(router, 5, d=current, e=other) == []


def test_request_with_a_transfer_in_progress_is_not_moved() -> None:
    router = waiting()
    router(Ready("d", 1, 2, 4, 0, AT))
    assert advance(router, 5, d=FULL, e=EMPTY) == []


def test_repeated_moves_back_off() -> None:
    """Each of two workers reports capacity only while the request waits at the other worker."""
    router = waiting()
    for worker in "edededed":
        other = "d" if worker == "e" else "e"
        loads = {other: FULL, worker: EMPTY}
        start = router.now
        while not submits(advance(router, 0.5, **loads)):
            assert router.now - start < 300
    assert router.dispatcher.num_rebalanced == 8
    assert router.now - 1000.0 >= sum(rebalance_delay(before) for before in range(8))


@given(st.integers(0, 20))
def test_rebalance_delay_grows_exponentially(num_revisions: int) -> None:
    assert rebalance_delay(0) == INITIAL_SECONDS
    assert rebalance_delay(num_revisions + 1) == BACKOFF_FACTOR * rebalance_delay(num_revisions)
