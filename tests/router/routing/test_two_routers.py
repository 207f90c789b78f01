"""Several routers share workers: no worker is overloaded, and no router starves."""

from collections import Counter
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
from penstock.router.routing.placement.routing_strategies import policy_of
from penstock.router.routing.prefix_cache.cache_events import CacheSnapshot
from penstock.router.routing.worker_registry import LivenessBounds, WorkerRegistry
from tests.support.columns import tokens_of
from tests.support.fake_worker import FakeWorker, reference
from tests.support.router_world import info_of

SPAN = 1000  # each router uses its own range of request numbers


@dataclass
class Router:
    """One of several routers, with streams to all workers."""

    number: int
    dispatcher: Dispatcher
    answers: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, EndRequest] = field(default_factory=dict)
    requests: dict[int, Request] = field(default_factory=dict)


class Shared:
    """Mixed workers of several routers. Each router gets its own requests' events and all loads."""

    def __init__(
        self,
        infos: list[WorkerInfo],
        num_routers: int,
        ttft_slo_seconds: float = 0.0,
        max_queued: int = 1024,
    ) -> None:
        limits = DispatcherLimits(max_queued, ttft_slo_seconds=ttft_slo_seconds)
        self.workers = {info.worker: FakeWorker(info) for info in infos}
        self.routers = [
            Router(number, Dispatcher(policy_of("cost"), limits)) for number in range(num_routers)
        ]
        self.now = 0.0
        # For each step, the number of sequences above max_sequences.
        self.waiting_counts: list[int] = []
        for router in self.routers:
            for info in infos:
                self.send_event(router, WorkerUp(info))
                no_blocks = CacheSnapshot(info.worker, info.incarnation, 0, 0, True, ())
                self.send_event(router, no_blocks)

    def send_event(self, router: Router, event: Event) -> None:
        for command in router.dispatcher.handle(event, self.now):
            self._carry(router, command)
        router.dispatcher.check()

    def _carry(self, router: Router, command: Command) -> None:
        match command:
            case Deliver():
                for token in tokens_of(command.tokens):
                    answer = router.answers.setdefault(token.request, [])
                    assert token.position == len(answer)
                    answer.append(token.token)
            case EndRequest():
                router.ends[command.request] = command
            case Submit() | Yield() | Drop():
                self.workers[command.worker].inbox.append(command)
            case _:
                raise AssertionError(f"unexpected for mixed workers without faults: {command}")

    def submit_request(
        self, number: int, num_prompt: int, max_tokens: int, tenant: str = ""
    ) -> None:
        router = self.routers[number]
        name = number * SPAN + len(router.requests)
        request = Request(
            name, [name] * num_prompt, SamplingParams(), max_tokens=max_tokens, tenant=tenant
        )
        router.requests[name] = request
        self.send_event(router, RequestArrived(request))

    def run_step(self, name: str) -> None:
        """Let one worker handle its inbox, run a step and deliver its events."""
        worker = self.workers[name]
        while worker.inbox:
            worker.execute_next()
        self.waiting_counts.append(max(len(worker.held) - worker.info.max_sequences, 0))
        worker.step()
        while worker.outbox:
            event = worker.outbox.popleft()
            for router in self.routers:
                own_event = self._own_event(router.number, event)
                if own_event is not None:
                    self.send_event(router, own_event)

    def _own_event(self, number: int, event: Event) -> Event | None:
        if isinstance(event, Stepped):
            own = [row for row, name in enumerate(event.tokens.requests) if name // SPAN == number]
            return Stepped(event.worker, event.tokens.select(own), event.load)
        return event if getattr(event, "request", -1) // SPAN == number else None

    def run(self, rng: Random) -> None:
        """Run random workers until all requests have ended."""
        for _ in range(10_000):
            if all(len(each.ends) == len(each.requests) for each in self.routers):
                return
            self.run_step(rng.choice(list(self.workers)))
            if rng.random() < 0.1:
                self.now += 0.5
                for router in self.routers:
                    self.send_event(router, Tick())
        raise AssertionError("some requests never ended")

    def check(self) -> None:
        for router in self.routers:
            for name, request in router.requests.items():
                assert router.ends[name].status is Status.OK
                assert [router.answers[name]] == reference(request)
        assert not any(worker.held for worker in self.workers.values())


SLOS = [0.0, 1.0]


@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from(SLOS), st.integers(0, 2**32))
@settings(deadline=None, max_examples=40)
def test_all_requests_of_all_routers_end(
    num_workers: int, num_routers: int, ttft_slo: float, seed: int
) -> None:
    rng = Random(seed)
    # A long answer takes a third of a worker's blocks, so other routers must count its blocks.
    infos = [info_of(f"m{n}", "mixed", num_blocks=12) for n in range(num_workers)]
    shared = Shared(infos, num_routers, ttft_slo)
    for _ in range(30):
        shared.submit_request(
            rng.randrange(num_routers), rng.choice([1, 5, 9]), rng.choice([1, 4, 12])
        )
        if rng.random() < 0.7:
            shared.run_step(rng.choice(list(shared.workers)))
    shared.run(rng)
    shared.check()


@pytest.mark.parametrize("num_routers", [1, 2, 3])
def test_requests_queue_at_the_routers_and_not_at_a_full_worker(num_routers: int) -> None:
    """On average, at most one request per additional router waits at a full worker."""
    rng = Random(1)
    shared = Shared([info_of("m0", "mixed", num_blocks=1000)], num_routers)
    for number in range(60 * num_routers):
        shared.submit_request(number % num_routers, 3, rng.randint(4, 14))
        if number % num_routers == num_routers - 1:
            shared.run_step("m0")
    shared.run(rng)
    shared.check()
    assert sum(shared.waiting_counts) / len(shared.waiting_counts) <= 1.0 * (num_routers - 1)


@pytest.mark.parametrize("ttft_slo", SLOS)
def test_router_with_many_requests_does_not_starve_another(ttft_slo: float) -> None:
    """A router that floods a worker does not starve a router that sends requests later."""
    shared = Shared([info_of("m0", "mixed", num_blocks=1000)], 2, ttft_slo)
    for _ in range(200):
        shared.submit_request(0, 3, 12)
    shared.run_step("m0")
    shared.submit_request(1, 3, 12)
    num_steps = 0
    while not shared.routers[1].ends:
        shared.run_step("m0")
        num_steps += 1
    assert num_steps < 40
    assert len(shared.routers[0].ends) < 100
    shared.run(Random(0))
    shared.check()


def test_greedy_tenant_at_two_routers_does_not_shut_out_another() -> None:
    """Each router displaces requests of the tenant that fills its queue; all requests end."""
    shared = Shared([info_of("m0", "mixed", num_blocks=1000)], 2, max_queued=8)
    for number in (0, 1):
        for _ in range(100):
            shared.submit_request(number, 3, 12, "greedy")
        for _ in range(4):
            shared.submit_request(number, 3, 12, "other")
        shared.submit_request(number, 3, 12, "greedy")
    shared.run(Random(0))
    for router in shared.routers:
        refused = Counter(
            router.requests[name].tenant
            for name, end in router.ends.items()
            if end.status is Status.OVERLOADED
        )
        assert refused.keys() == {"greedy"}
        accepted = Counter(request.tenant for request in router.requests.values()) - refused
        assert accepted["other"] == 4
        assert accepted["greedy"] >= 4
        assert all(
            end.retry_after is not None
            for end in router.ends.values()
            if end.status is Status.OVERLOADED
        )


def test_usage_of_other_routers_follows_the_load_reports() -> None:
    registry = WorkerRegistry(LivenessBounds())
    info = info_of("m0", "mixed", num_blocks=64)
    view = registry.add(info, WorkerLoad(running=3, free_blocks=20), 0.0)
    assert (view.num_foreign_sequences, view.num_foreign_blocks) == (3, 44)
    assert view.has_capacity(8, 1), "a router without requests there may always place one"
    view.set_usage(1, view.resource_usage(8, 1))
    assert not view.has_capacity(8, 1), "three foreign sequences and one own take all four rows"
    view.update_load(WorkerLoad(running=2, queued=1, free_blocks=20), 1.0)
    assert (view.num_foreign_sequences, view.num_foreign_blocks) == (2, 41)
    assert view.has_capacity(8, 1)
    assert not view.has_capacity(100, 1), "20 blocks are free, not 61"
    view.update_load(WorkerLoad(running=1, free_blocks=20), 2.0)
    assert (view.num_foreign_sequences, view.num_foreign_blocks) == (0, 0), (
        "all usage in the report is our own"
    )
    assert view.has_capacity(100, 1)
