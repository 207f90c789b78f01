"""Rounds of measurements of all routers, which take turns within one run."""

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from penstock.loadtests.comparison.routers.client import read_streams
from penstock.loadtests.comparison.routers.figures import (
    DIRECT,
    RateSearch,
    Sample,
    cpu_per_token,
    cpu_used,
)
from penstock.loadtests.comparison.routers.process import Target, peer_router, penstock_router
from penstock.loadtests.comparison.routers.routers import PENSTOCK, Router
from penstock.loadtests.comparison.routers.stubs import Stub, stub

_WARM_UP_LEN = 20  # tokens per stream of the warm-up
_PROBE_LEN = 2
_START_RATE = 1000.0  # first rate of the search for the highest rate, in tokens per second
_MAX_RATE = 100_000.0
_TRIAL_SECONDS = 1.5
_MIN_TRIAL_LEN = 10  # minimum tokens per stream of a trial


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one round."""

    streams: int
    output_len: int
    step_ms: float
    probes: int
    idle_seconds: float
    saturate: bool


class Rounds:
    """Context manager that runs the stubs and all routers, and measures them."""

    def __init__(self, peers: Sequence[tuple[Router, Path]], work: Work) -> None:
        self._peers, self._work = peers, work
        self._stack = AsyncExitStack()
        self._stubs: list[Stub] = []
        self.targets: list[Target] = []

    async def __aenter__(self) -> "Rounds":
        async with AsyncExitStack() as stack:
            openai = await stack.enter_async_context(stub("openai", self._work.step_ms))
            worker = await stack.enter_async_context(stub("worker", self._work.step_ms))
            self._stubs = [openai, worker]
            self.targets = [
                Target(DIRECT, "the stub alone", openai.address, openai.process.pid, {}),
                await stack.enter_async_context(penstock_router(PENSTOCK, worker.address)),
            ]
            for router, python in self._peers:
                starting = peer_router(router, python, openai.address)
                self.targets.append(await stack.enter_async_context(starting))
            for target in self.targets:
                load = await read_streams(target.address, self._work.streams, _WARM_UP_LEN)
                load.check(_WARM_UP_LEN)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def run(self, number: int, report: Callable[[str], None]) -> dict[str, Sample]:
        """Measure every target once.

        The order of the targets rotates from round to round.
        """
        shift = number % len(self.targets)
        targets = [*self.targets[shift:], *self.targets[:shift]]
        report("first tokens")
        singles = await self._first_tokens(targets)
        samples = {}
        for target in targets:
            report(target.title)
            sample = await self._measure(target, singles[target.name])
            samples[target.name] = sample
        return {target.name: samples[target.name] for target in self.targets}

    async def _first_tokens(self, targets: Sequence[Target]) -> dict[str, float]:
        """Return the median time to the first token of single requests, by target."""
        times: dict[str, list[float]] = {target.name: [] for target in targets}
        for _ in range(self._work.probes):
            for target in targets:
                load = await read_streams(target.address, 1, _PROBE_LEN)
                load.check(_PROBE_LEN)
                times[target.name].append(load.answers[0].ttft)
        return {name: statistics.median(values) for name, values in times.items()}

    async def _measure(self, target: Target, first_single: float) -> Sample:
        work = self._work
        began, before = time.perf_counter(), target.cpu_seconds()
        await asyncio.sleep(work.idle_seconds)
        idle = cpu_used(before, target.cpu_seconds()) / (time.perf_counter() - began)
        began, before = time.perf_counter(), target.cpu_seconds()
        load = await read_streams(target.address, work.streams, work.output_len)
        seconds, used = time.perf_counter() - began, cpu_used(before, target.cpu_seconds())
        num_tokens = work.streams * work.output_len
        return Sample(
            cpu_per_token=cpu_per_token(used, seconds, idle, num_tokens),
            idle_cores=idle,
            writes_per_token=load.check(work.output_len) / num_tokens,
            first_single=first_single,
            first_burst=statistics.median(answer.ttft for answer in load.answers),
            max_rate=await self._max_rate(target) if work.saturate else None,
        )

    async def _max_rate(self, target: Target) -> float:
        """Return the highest rate (tokens/s) that reaches the clients without a backlog."""
        streams, search = self._work.streams, RateSearch(_START_RATE, _MAX_RATE)
        try:
            while (rate := search.next_rate()) is not None:
                step = streams / rate
                self._set_step(1000 * step)
                output_len = max(round(_TRIAL_SECONDS / step), _MIN_TRIAL_LEN)
                load = await read_streams(target.address, streams, output_len)
                load.check(output_len)
                search.record(rate, streams * (output_len - 1) / load.streaming_seconds)
        finally:
            self._set_step(self._work.step_ms)
        return search.best

    def _set_step(self, step_ms: float) -> None:
        for each in self._stubs:
            each.set_step(step_ms)
