"""One run: a dispatcher with a placement strategy, and workers that compute prompts."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.common.sampling_params import SamplingParams
from penstock.loadtests.simulator.routing.prefill_worker import PrefillWorker
from penstock.router.routing.dispatcher import Dispatcher, DispatcherLimits
from penstock.router.routing.events import (
    AssignWaiting,
    Event,
    Request,
    RequestArrived,
    Stepped,
    Submit,
    WorkerInfo,
    WorkerUp,
)
from penstock.router.routing.placement.rankings.hashing import mix
from penstock.router.routing.placement.routing_strategies import policy_of


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request of the load. Computing the prompt takes time; its answer has only one token."""

    at: float  # arrival time in seconds
    num_tokens: int
    blocks: Sequence[int]  # ids of the prompt's full blocks; equal ids mean equal tokens


@dataclass(frozen=True, slots=True)
class Plan:
    """The cluster that serves the load."""

    num_workers: int
    num_blocks: int  # number of KV blocks of one worker
    block_size: int
    tokens_per_second: float  # prompt tokens that one worker computes per second


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of a run."""

    seconds: Sequence[float]  # seconds to the first token of each prompt
    placed_at: Sequence[str]  # name of the worker of each prompt
    jobs_ahead: Sequence[int]  # number of prompts at the worker when the prompt arrived there
    cached_tokens: int
    computed_tokens: Mapping[str, int]  # number of computed prompt tokens, by worker


class RoutingRun:
    """Simulates one load on one cluster with one strategy."""

    def __init__(self, plan: Plan, strategy: str) -> None:
        limits = DispatcherLimits(
            max_queued=10**6, max_queued_tokens=10**12, max_queued_cost=10**12
        )
        self._dispatcher = Dispatcher(policy_of(strategy), limits)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._num_scheduled = 0
        self._plan = plan
        self._workers: dict[str, PrefillWorker] = {}
        for number in range(plan.num_workers):
            name = f"w{number:04}"
            info = WorkerInfo(
                *(name, "1", "mixed", "layout", plan.block_size, plan.num_blocks),
                max_model_len=plan.num_blocks * plan.block_size,
                max_sequences=10**6,
            )
            self._workers[name] = PrefillWorker(
                info, plan.tokens_per_second, self._dispatcher.prefix_index, self._at, self._handle
            )
            self._handle(WorkerUp(info), 0.0)

    def play(self, prompts: Sequence[Prompt]) -> Outcome:
        """Run the simulation until all prompts are computed."""
        self._arrived_at = [prompt.at for prompt in prompts]
        self._seconds = [0.0] * len(prompts)
        self._placed_at = [""] * len(prompts)
        self._jobs_ahead = [0] * len(prompts)
        requests = [self._request(number, prompt) for number, prompt in enumerate(prompts)]
        waiting = iter(requests)
        following = next(waiting, None)
        while self._events or following is not None:
            if following is not None and (
                not self._events or prompts[following.id].at <= self._events[0][0]
            ):
                self._handle(RequestArrived(following), prompts[following.id].at)
                following = next(waiting, None)
                continue
            now, _, call = heapq.heappop(self._events)
            call(now)
        return Outcome(
            self._seconds,
            self._placed_at,
            self._jobs_ahead,
            sum(worker.cached_tokens for worker in self._workers.values()),
            {name: worker.computed_tokens for name, worker in self._workers.items()},
        )

    def _request(self, number: int, prompt: Prompt) -> Request:
        hashes = [mix(block) for block in prompt.blocks]
        return Request(
            number,
            range(prompt.num_tokens),
            SamplingParams(),
            max_tokens=1,
            prompt_hashes={self._plan.block_size: hashes},
        )

    def _at(self, when: float, call: Callable[[float], None]) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._events, (when, self._num_scheduled, call))

    def _handle(self, event: Event, now: float) -> None:
        if isinstance(event, Stepped):
            for request in event.tokens.requests:
                self._seconds[request] = now - self._arrived_at[request]
        commands = self._dispatcher.handle(event, now)
        while self._dispatcher.has_more_to_assign:
            commands += self._dispatcher.handle(AssignWaiting(), now)
        for command in commands:
            if isinstance(command, Submit):
                worker = self._workers[command.worker]
                self._placed_at[command.request.id] = command.worker
                self._jobs_ahead[command.request.id] = worker.num_jobs
                worker.submit(command, now)
