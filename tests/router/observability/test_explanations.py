"""Explanations: events, time by phase, and bounds, with a real dispatcher and a fake clock."""

import gc
from typing import Any

import pytest

from penstock.common.sampling_params import SamplingParams
from penstock.common.worker_load import WorkerLoad
from penstock.router.observability.explained_request import MAX_EVENTS, ExplainedRequest, Spent
from penstock.router.observability.explanations import MAX_DECISIONS, Explanations
from penstock.router.observability.request_metrics import RequestMetrics
from penstock.router.requests.open_requests import OpenRequests
from penstock.router.routing import events as ev
from penstock.router.routing.dispatcher import Dispatcher
from penstock.router.routing.placement.routing_strategies import policy_of
from tests.support.columns import NewToken, columns_of
from tests.support.router_harness import AT, D, E, M, N, P
from tests.support.silent_output import silent_output

WALL = 1_700_000_000.0


class World:
    """A dispatcher that passes events and commands to the explanations, as the frontend does."""

    def __init__(self, *infos: ev.WorkerInfo, max_ended: int = 8) -> None:
        names = {"t1": "key-1"}
        self.metrics = RequestMetrics(names)
        self.explanations = Explanations(names, "cost", max_ended, lambda: WALL)
        self.requests = OpenRequests(self.metrics, self.explanations)
        self.dispatcher = Dispatcher(policy_of("cost"))
        self.dispatcher.listen(self.explanations)
        self.now = 1000.0
        for info in infos:
            self(ev.WorkerUp(info))

    def __call__(self, event: ev.Event, wait: float = 0.0) -> list[ev.Command]:
        self.now += wait
        self.requests.observe(event, self.now)
        commands = self.dispatcher.handle(event, self.now)
        for command in commands:
            match command:
                case ev.EndRequest():
                    self.requests.end(command, self.now)
                case ev.Deliver():
                    self.requests.deliver(command.tokens, self.now)
                case ev.Submit() | ev.Send() | ev.Drop() | ev.Yield():
                    self.requests.record(command, self.now)
        return commands

    def arrive(self, number: int = 1, name: str = "a", tenant: str = "t1", size: int = 9) -> None:
        request = ev.Request(
            number, [987654] * size, SamplingParams(), tenant=tenant, external_id=name
        )
        self.requests.open(request, silent_output(), self.now)
        self(ev.RequestArrived(request))

    def step(self, worker: str, attempt: int, *positions: int, **more: Any) -> None:
        number, finish = more.pop("number", 1), more.pop("finish", ev.Finish.NONE)
        tokens = [NewToken(number, attempt, 0, position, 5, finish) for position in positions]
        self(ev.Stepped(worker, columns_of(tokens), **more), more.pop("wait", 0.0))

    def only(self, name: str = "a") -> ExplainedRequest:
        (found,) = self.explanations.find(name, None)
        return found

    def kinds(self) -> list[tuple[str, str]]:
        return [(event.kind, event.worker) for event in self.only().events]

    def times(self) -> dict[str, float]:
        times = self.only().times(self.now)
        assert sum(times) == pytest.approx(self.only().elapsed(self.now))
        return {
            phase.name.lower(): round(spent, 9)
            for phase, spent in zip(Spent, times, strict=True)
            if spent
        }


def finish(world: World, worker: str, attempt: int, position: int, wait: float = 0.0) -> None:
    world.now += wait
    world.step(worker, attempt, position, finish=ev.Finish.STOP)


def test_disaggregated_request_has_all_phases_and_events() -> None:
    world = World(P, D)
    world.arrive()
    world.now += 1.0
    load = WorkerLoad(last_step_seconds=0.25, num_steps=10)
    world.step("p", 1, load=load, cached=[(1, 1, 4)])
    world.now += 0.5
    world.step("p", 1, 0, load=WorkerLoad(num_steps=13))
    world(ev.Yielded("p", 1, 1, 9))
    world(ev.Ready("d", 1, 2, 7, 4, AT), wait=2.0)
    world(ev.Received("d", 1, 2, 7, 1234), wait=3.0)
    finish(world, "d", 2, 1, wait=4.0)
    assert world.kinds() == [
        ("arrived", ""),
        ("placed", "p"),
        ("admitted", "p"),
        ("first_token", "p"),
        ("yielded", "p"),
        ("submitted", "d"),
        ("transfer_started", "d"),
        ("transfer_ended", "d"),
        ("ended", "d"),
    ]
    assert world.times() == {
        "worker_queue": 0.75,
        "prefill": 0.75,
        "wait": 2.0,
        "transfer": 3.0,
        "decode": 4.0,
    }
    found = world.only()
    assert (found.num_cached, found.prefill_steps, found.num_bytes) == (4, 4, 1234)
    assert (found.first_token, found.seconds, found.finish_reason) == (1.5, 10.5, "stop")
    placed = next(event for event in found.events if event.kind == "placed")
    assert (placed.other_worker, placed.detail, placed.num_workers) == ("d", "apart: unmeasured", 2)
    assert {each.worker for each in placed.candidates} == {"p", "d"}
    decisions = [
        (each.number, each.worker, each.other_worker) for each in world.explanations.decisions
    ]
    assert decisions == [(1, "p", "d"), (2, "d", "p")]


def test_lost_worker_is_a_failover_and_its_time_is_recovery() -> None:
    world = World(M, N)
    world.arrive()
    world.step("m", 1, 0)
    world(ev.WorkerLost("m"), wait=1.0)
    world.now += 2.0
    world.step("n", 2, 1)
    finish(world, "n", 2, 2, wait=3.0)
    assert world.kinds() == [
        ("arrived", ""),
        ("placed", "m"),
        ("first_token", "m"),
        ("worker_lost", "m"),
        ("placed", "n"),
        ("continued", "n"),
        ("ended", "n"),
    ]
    assert world.times() == {"decode": 4.0, "recovery": 2.0}
    assert world.only().num_failovers == 1
    assert world.only().events[4].detail == "its worker was lost: routing: cost"


def test_request_that_is_admitted_again_was_preempted() -> None:
    world = World(M)
    world.arrive()
    world.step("m", 1, 0, cached=[(1, 1, 4)])
    world.step("m", 1, 1, cached=[(1, 1, 8)])
    assert world.only().num_preemptions == 1
    assert world.only().num_cached == 4
    assert ("readmitted", "m") in world.kinds()


def test_rejected_request_names_the_worker_and_hides_unsafe_messages() -> None:
    world = World(M, N)
    world.arrive()
    world(ev.Rejected("m", 1, 1, "no room at /var/lib/penstock"))
    assert world.kinds() == [("arrived", ""), ("placed", "m"), ("rejected", "m"), ("placed", "n")]
    assert world.only().events[2].detail == "see the server's log"


def test_failed_transfer_continues_with_recovery() -> None:
    world = World(P, D)
    world.arrive()
    world.step("p", 1, 0)
    world(ev.Yielded("p", 1, 1, 9))
    world(ev.Ready("d", 1, 2, 7, 0, AT))
    world(ev.Failed("d", 1, 2, 7, "checksum"), wait=1.0)
    world.now += 2.0
    world.step("d", 2, 1)
    assert ("transfer_failed", "d") in world.kinds()
    assert world.times() == {"transfer": 1.0, "recovery": 2.0}


def test_drain_names_its_reason_and_counts_a_migration() -> None:
    world = World(D, E)
    world.arrive()
    (first,) = [each.worker for each in world.explanations.decisions]
    other = {"d": "e", "e": "d"}[first]
    world.step(first, 1, 0)
    world(ev.Draining(first))
    submitted = world.only().events[-1]
    assert (submitted.kind, submitted.worker, submitted.other_worker) == ("submitted", other, first)
    assert submitted.detail == "the worker drains"
    assert world.only().num_migrations == 1


def test_open_request_is_explained_up_to_now() -> None:
    world = World()
    world.arrive()
    world.now += 2.0
    assert world.times() == {"queue": 2.0}
    assert (world.only().state.value, world.only().finish_reason) == ("queued", "")


def test_only_the_tenant_of_a_request_finds_it() -> None:
    world = World(M)
    world.arrive(1, "same", "t1")
    world.arrive(2, "same", "t2")
    found = world.explanations.find
    assert [each.number for each in found("same", "t1")] == [1]
    assert [each.number for each in found("same", "t2")] == [2]
    assert [each.number for each in found("same", None)] == [1, 2]
    assert found("same", "t3") == found("other", None) == []
    assert found("same", "t2")[0].tenant_name == "other"


def test_ring_keeps_the_latest_requests_and_forgets_their_prompts() -> None:
    world = World(M, max_ended=3)
    for number in range(1, 7):
        world.arrive(number, f"r{number}")
        world.step("m", 1, 0, number=number, finish=ev.Finish.STOP)
    kept = [number for number in range(1, 7) if world.explanations.find(f"r{number}", None)]
    assert kept == [4, 5, 6]
    held: list[Any] = [world.explanations]
    seen: dict[int, Any] = {}
    while held:
        each = held.pop()
        if id(each) not in seen and not isinstance(each, type | ev.WorkerInfo):
            seen[id(each)] = each
            held += [one for one in gc.get_referents(each) if not callable(one)]
    assert not any(isinstance(each, ev.Request) for each in seen.values())
    assert 987654 not in [each for each in seen.values() if isinstance(each, int)]


def test_events_of_a_request_and_decisions_are_bounded() -> None:
    world = World(M)
    world.arrive()
    for _ in range(MAX_EVENTS + 5):
        world.step("m", 1, cached=[(1, 1, 0)])
    found = world.only()
    assert len(found.events) == MAX_EVENTS
    assert found.num_left_out == 2 + MAX_EVENTS + 5 - MAX_EVENTS
    for number in range(2, MAX_DECISIONS + 10):
        world.arrive(number, "b")
        world.step("m", 1, 0, number=number, finish=ev.Finish.STOP)
    assert len(world.explanations.decisions) == MAX_DECISIONS


def test_refused_request_is_explained() -> None:
    world = World(M)
    request = ev.Request(1, [1], SamplingParams(), external_id="a", deadline=world.now - 1)
    world.requests.open(request, silent_output(), world.now)
    world(ev.RequestArrived(request))
    assert (world.only().finish_reason, world.only().tenant_name) == ("deadline", "other")
