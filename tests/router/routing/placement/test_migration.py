"""Requests move away from draining, suspect and full workers, to workers with room."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.events import (
    Command,
    Draining,
    Drop,
    Finish,
    Ready,
    Received,
    Rejected,
    RoleChanged,
    Send,
    Status,
    Stepped,
    Submit,
    TokenColumns,
    WorkerLost,
    WorkerUp,
    Yield,
    Yielded,
)
from penstock.router.routing.placement.migration import (
    BACKOFF_FACTOR,
    INITIAL_SECONDS,
    rebalance_delay,
)
from tests.support.router_harness import AT, D, E, M, N, P, Router, ends, submits
from tests.support.router_world import info_of

# ------------------------------------------------------------------ rebalancing

FULL = WorkerLoad(queued=1, running=4)
EMPTY = WorkerLoad(free_blocks=64)


def waiting() -> Router:
    """Return a router. Request 1 has a lease on p and waits for room on d; d and e are full."""
    router = Router(P, D, E)
    for worker in "de":
        router(Stepped(worker, TokenColumns(), FULL))
    router.arrive()
    router.step("p", 1, 0)
    assert submits(router(Yielded("p", 1, 1, 3))) == [("d", 1, 2)]
    return router


def advance(router: Router, seconds: float, **loads: WorkerLoad) -> list[Command]:
    """Advance time while the workers in `loads` repeatedly report these loads."""
    commands: list[Command] = []
    for _ in range(round(seconds / 0.5)):
        for worker, load in loads.items():
            # A growing step count shows that the worker is not stuck.
            steps = round(router.now * 2)
            commands += router(Stepped(worker, TokenColumns(), load._replace(num_steps=steps)))
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
        (FULL, WorkerLoad(free_blocks=0)),  # e has no queue, but also no free blocks
        # The prompts that are queued at e would go first.
        (FULL, WorkerLoad(free_blocks=64, queued_tokens=100)),
        # `e` has free blocks, but all its sequence slots are taken.
        (FULL, WorkerLoad(free_blocks=64, running=4)),
        (EMPTY, EMPTY),  # d itself has room, so the request stays there
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
    """Each of two workers reports room only while the request waits at the other worker."""
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


# ------------------------------------------------------------------ draining


def test_draining_worker_gets_no_requests_and_its_running_ones_move() -> None:
    router = Router(D)
    router.arrive(1)
    router.step("d", 1, 0)
    assert router(Draining("d")) == []  # d is the only worker, so the request stays there
    assert router.state("d") == "draining"
    commands = router(WorkerUp(E)) + router.wait(0.5, "d", "e")
    assert submits(commands) == [("e", 1, 2)]
    assert router.wait(1, "d", "e") == []  # the request is not submitted a second time
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
    # After the transfer to d has ended, the request moves to e.
    assert submits(router.wait(0.5, "p", "d", "e")) == [("e", 1, 3)]


def test_decode_target_that_drains_during_prefill_is_replaced() -> None:
    router = Router(P, D, E)
    router.arrive()
    router(Draining("d"))
    router.step("p", 1, 0)
    assert submits(router(Yielded("p", 1, 1, 3))) == [("e", 1, 2)]


# ------------------------------------------------------------------ a destination that leaves

F = info_of("f", "decode")


def migrating() -> Router:
    """Return a router. Request 1 runs on d, which drains; the request is to move to e."""
    router = Router(D)
    router.arrive()
    router.step("d", 1, 0)
    router(WorkerUp(E))
    assert submits(router(Draining("d"))) == [("e", 1, 2)]
    return router


@pytest.mark.parametrize("trouble", ["draining", "suspect", "prefill"])
def test_live_migration_gets_another_destination_at_once(trouble: str) -> None:
    router = migrating()
    router(WorkerUp(F))
    match trouble:
        case "draining":
            commands = router(Draining("e"))
        case "suspect":
            commands = router.wait(2.5, "d", "f")
        case _:
            commands = router(RoleChanged("e", "prefill"))
    assert commands[0] == Drop("e", 1, 2)
    assert submits(commands) == [("f", 1, 3)]
    assert router(Ready("f", 1, 3, 4, 0, AT)) == [Yield("d", 1, 1)]


@pytest.mark.parametrize("trouble", ["draining", "suspect"])
def test_live_migration_without_another_destination_is_withdrawn(trouble: str) -> None:
    """The request stays on d until another worker is usable, and then moves to that worker."""
    router = migrating()
    commands = router(Draining("e")) if trouble == "draining" else router.wait(2.5, "d")
    assert commands == [Drop("e", 1, 2)]
    assert router.step("d", 1, 1) != [], "d still generates"
    if trouble == "draining":
        router(WorkerUp(F))
    commands = router.wait(0.5, "d", "e", "f")
    assert submits(commands) == [("f" if trouble == "draining" else "e", 1, 3)]


@pytest.mark.parametrize("lost", [True, False])
def test_live_migration_gets_another_destination_after_a_loss_or_rejection(lost: bool) -> None:
    router = migrating()
    router(WorkerUp(F))
    assert router(WorkerLost("e") if lost else Rejected("e", 1, 2, "full")) == []
    assert submits(router.wait(0.5, "d", "f")) == [("f", 1, 3)]


def test_request_that_yields_for_a_destination_goes_to_another_one() -> None:
    router = migrating()
    router(WorkerUp(F))
    assert router(Ready("e", 1, 2, 4, 0, AT)) == [Yield("d", 1, 1)]
    assert router(Draining("e")) == [Drop("e", 1, 2)]
    assert submits(router(Yielded("d", 1, 1, 3))) == [("f", 1, 3)]


class DrainMachine(RuleBasedStateMachine):
    """A request decodes on a draining worker, while other workers connect, drain, fail or pause."""

    @initialize()
    def begin(self) -> None:
        self.router = Router(D)
        self.router.arrive()
        self.router.step("d", 1, 0)
        self.router(Draining("d"))
        self.roles: dict[str, str] = {}  # roles of connected workers that do not drain
        # Assigned roles by worker name. They also apply to workers that connect later.
        self.assigned: dict[str, str] = {}
        self.connected: set[str] = set()
        self.destinations: list[str] = []  # workers that got a Submit and no Drop after it

    def apply(self, commands: list[Command]) -> None:
        for command in commands:
            match command:
                case Submit():
                    self.destinations.append(command.worker)
                case Drop():
                    self.destinations.remove(command.worker)
                case _:
                    raise AssertionError(f"unexpected command: {command}")

    def tick(self, *silent: str) -> None:
        self.apply(self.router.wait(0.5, *{"d", *self.connected}.difference(silent)))

    @rule(name=st.sampled_from("efg"))
    def come(self, name: str) -> None:
        if name not in self.connected:
            self.apply(self.router(WorkerUp(info_of(name, "decode"))))
            self.connected.add(name)
            self.roles[name] = self.assigned.get(name, "decode")
            self.tick()

    @rule(name=st.sampled_from("efg"))
    def drain(self, name: str) -> None:
        if self.roles.pop(name, None):
            self.apply(self.router(Draining(name)))

    @rule(name=st.sampled_from("efg"))
    def lose(self, name: str) -> None:
        if name in self.connected:
            self.connected.remove(name)
            self.roles.pop(name, None)
            self.apply(self.router(WorkerLost(name)))
            self.destinations = [each for each in self.destinations if each != name]
            self.tick()

    @rule(name=st.sampled_from("efg"), role=st.sampled_from(["prefill", "decode"]))
    def change_role(self, name: str, role: str) -> None:
        if name in self.roles:
            self.roles[name] = self.assigned[name] = role
            self.apply(self.router(RoleChanged(name, role)))
            if role == "decode":  # the router moves the request to a better worker at its next tick
                self.tick()

    @rule(name=st.sampled_from("efg"))
    def fall_silent(self, name: str) -> None:
        if name in self.roles:
            for _ in range(5):
                self.tick(name)
            if len(self.roles) > 1:
                assert name not in self.destinations
            self.tick()  # the worker sends heartbeats again

    @invariant()
    def request_has_the_best_destination(self) -> None:
        if not self.roles:
            assert self.destinations == []
            return
        (name,) = self.destinations
        assert name in self.roles
        if "decode" in self.roles.values():
            assert self.roles[name] == "decode"


TestDrain = DrainMachine.TestCase
TestDrain.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
