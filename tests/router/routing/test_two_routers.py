"""Several routers over the same workers: nobody is alone, nobody is kept out, everything ends."""

from dataclasses import dataclass, field
from random import Random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from penstock.common.sampling_params import SamplingParams
from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.dispatcher import Dispatcher, DispatcherLimits
from penstock.router.routing.events import (
    Command,
    Deliver,
    Drop,
    EndRequest,
    Event,
    Request,
    RequestArrived,
    Status,
    Stepped,
    Submit,
    Tick,
    WorkerInfo,
    WorkerUp,
    Yield,
)
from penstock.router.routing.placement.policy import LeastLoaded
from penstock.router.routing.worker_registry import LivenessBounds, WorkerRegistry
from tests.support.fake_worker import FakeWorker, reference
from tests.support.router_world import info_of

SPAN = 1000  # numbers of requests of one router


@dataclass
class Router:
    """One of several, with its streams to all workers."""

    number: int
    dispatcher: Dispatcher
    answers: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, EndRequest] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)


class Shared:
    """Workers of role mixed that several routers use; a worker tells each its own, and its load."""

    def __init__(
        self, infos: list[WorkerInfo], num_routers: int, ttft_slo_seconds: float = 0.0
    ) -> None:
        limits = DispatcherLimits(ttft_slo_seconds=ttft_slo_seconds)
        self.workers = {info.worker: FakeWorker(info) for info in infos}
        self.routers = [
            Router(number, Dispatcher(LeastLoaded(), limits)) for number in range(num_routers)
        ]
        self.now = 0.0
        self.lines: list[int] = []  # sequences that had to wait at a worker, turn by turn
        for router in self.routers:
            for info in infos:
                self.tell(router, WorkerUp(info))

    def tell(self, router: Router, event: Event) -> None:
        for command in router.dispatcher.handle(event, self.now):
            self._carry(router, command)
        router.dispatcher.check()

    def _carry(self, router: Router, command: Command) -> None:
        match command:
            case Deliver():
                answer = router.answers.setdefault(command.request, [])
                assert command.position == len(answer)
                answer.extend(command.tokens)
            case EndRequest():
                router.ends[command.request] = command
            case Submit() | Yield() | Drop():
                self.workers[command.worker].inbox.append(command)
            case _:
                raise AssertionError(f"not among mixed workers without faults: {command}")

    def ask(self, number: int, num_prompt: int, max_tokens: int) -> None:
        router = self.routers[number]
        name = number * SPAN + len(router.requests)
        request = Request(name, [name] * num_prompt, SamplingParams(), max_tokens=max_tokens)
        router.requests[name] = request
        self.tell(router, RequestArrived(request))

    def turn(self, name: str) -> None:
        """One worker obeys what has come, makes a step, and tells of it."""
        worker = self.workers[name]
        while worker.inbox:
            worker.obey()
        self.lines.append(max(len(worker.held) - worker.info.max_sequences, 0))
        worker.step()
        while worker.outbox:
            event = worker.outbox.popleft()
            for router in self.routers:
                mine = self._mine(router.number, event)
                if mine is not None:
                    self.tell(router, mine)

    def _mine(self, number: int, event: Event) -> Event | None:
        if isinstance(event, Stepped):
            tokens = [token for token in event.tokens if token.request // SPAN == number]
            return Stepped(event.worker, tokens, event.load)
        return event if getattr(event, "request", -1) // SPAN == number else None

    def run(self, rng: Random) -> None:
        """Until all have ended."""
        for _ in range(10_000):
            if all(len(each.ends) == len(each.requests) for each in self.routers):
                return
            self.turn(rng.choice(list(self.workers)))
            if rng.random() < 0.1:
                self.now += 0.5
                for router in self.routers:
                    self.tell(router, Tick())
        raise AssertionError("it does not come to rest")

    def check(self) -> None:
        for router in self.routers:
            for name, request in router.requests.items():
                assert router.ends[name].status is Status.OK
                assert [router.answers[name]] == reference(request)
        assert not any(worker.held for worker in self.workers.values())


PROMISES = [0.0, 1.0]


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from(PROMISES), st.integers(0, 2**32))
@settings(deadline=None, max_examples=40)
def test_all_requests_of_all_routers_end(
    num_workers: int, num_routers: int, promised: float, seed: int
) -> None:
    rng = Random(seed)
    # A long answer alone takes a third of a worker's blocks: what others hold matters.
    infos = [info_of(f"m{n}", "mixed", num_blocks=12) for n in range(num_workers)]
    shared = Shared(infos, num_routers, promised)
    for _ in range(30):
        shared.ask(rng.randrange(num_routers), rng.choice([1, 5, 9]), rng.choice([1, 4, 12]))
        if rng.random() < 0.7:
            shared.turn(rng.choice(list(shared.workers)))
    shared.run(rng)
    shared.check()


@pytest.mark.parametrize("num_routers", [1, 2, 3])
def test_a_full_worker_is_full_for_all(num_routers: int) -> None:
    """All may take the place that they see become free; but the line is at the routers, not at
    the worker, where each would put as many as if it were alone."""
    rng = Random(1)
    shared = Shared([info_of("m0", "mixed", num_blocks=1000)], num_routers)
    for number in range(60 * num_routers):
        shared.ask(number % num_routers, 3, rng.randint(4, 14))
        if number % num_routers == num_routers - 1:
            shared.turn("m0")
    shared.run(rng)
    shared.check()
    assert sum(shared.lines) / len(shared.lines) <= 1.0 * (num_routers - 1)


@pytest.mark.parametrize("promised", PROMISES)
def test_no_router_is_kept_out(promised: float) -> None:
    """One that floods a worker does not starve one that comes later with a little."""
    shared = Shared([info_of("m0", "mixed", num_blocks=1000)], 2, promised)
    for _ in range(200):
        shared.ask(0, 3, 12)
    shared.turn("m0")
    shared.ask(1, 3, 12)
    turns = 0
    while not shared.routers[1].ends:
        shared.turn("m0")
        turns += 1
    assert turns < 40
    assert len(shared.routers[0].ends) < 100
    shared.run(Random(0))
    shared.check()


def test_what_others_hold_is_seen_and_forgotten() -> None:
    fleet = WorkerRegistry(LivenessBounds())
    info = info_of("m0", "mixed", num_blocks=64)
    view = fleet.add(info, WorkerLoad(running=3, free_blocks=20), 0.0)
    assert (view.num_foreign_sequences, view.num_foreign_blocks) == (3, 44)
    assert view.has_capacity(8, 1), "nobody is kept out"
    view.set_usage(1, view.resource_usage(8, 1))
    assert not view.has_capacity(8, 1), "three of others and one of ours are four"
    view.update_load(WorkerLoad(running=2, queued=1, free_blocks=20), 1.0)
    assert (view.num_foreign_sequences, view.num_foreign_blocks) == (2, 41)
    assert view.has_capacity(8, 1)
    assert not view.has_capacity(100, 1), "20 blocks are free, not 61"
    view.update_load(WorkerLoad(running=1, free_blocks=20), 2.0)
    assert (view.num_foreign_sequences, view.num_foreign_blocks) == (0, 0), "what grew is our own"
    assert view.has_capacity(100, 1)
