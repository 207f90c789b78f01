"""Sends what was planned, when it was planned, and times what comes back."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from penstock.loadtests.bench.clients import Client, RequestFailed
from penstock.loadtests.bench.metrics import Outcome
from penstock.loadtests.bench.workload import Planned, Prompts


@dataclass(slots=True)
class Load:
    """A load under way, then what came of it."""

    client: Client
    prompts: Prompts
    plan: Sequence[Planned]  # in the order of their times
    concurrency: int | None = None  # requests under way at most; None: any number
    on_done: Callable[[Outcome], None] = lambda _: None
    outcomes: list[Outcome] = field(default_factory=list)  # that ended, in that order
    duration: float = 0.0  # seconds
    interrupted: bool = False
    _origin: float = 0.0  # of all times here, on the clock of perf_counter

    async def run(self) -> None:
        """Run to the end, or until cancelled: what has ended until then counts."""
        self._origin = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._release(tasks)
        except asyncio.CancelledError:
            self.interrupted = True  # by Ctrl-C: asyncio.Runner cancels the main task
        self.duration = self._now()

    async def _release(self, tasks: asyncio.TaskGroup) -> None:
        """Begin each request at its time and, of so many at once, when one of them has ended.

        A task is made only for what has a slot: those that wait cost nothing.
        """
        slots = asyncio.Semaphore(self.concurrency or len(self.plan))
        full_until = 0.0
        for planned in self.plan:
            await asyncio.sleep(max(0.0, planned.due - self._now()))
            # What came due while all slots were taken was not late by this client's fault.
            released = planned.due if planned.due < full_until else self._now()
            was_full = slots.locked()
            await slots.acquire()
            full_until = self._now() if was_full else full_until
            task = tasks.create_task(self._one(planned, released))
            task.add_done_callback(lambda _: slots.release())

    async def _one(self, planned: Planned, released: float) -> None:
        outcome = Outcome(
            planned.number, planned.due, planned.input_len, planned.output_len, released=released
        )
        await self._send(self.prompts.tokens(planned), outcome)
        self.outcomes.append(outcome)
        self.on_done(outcome)

    async def _send(self, prompt: list[int], outcome: Outcome) -> None:
        outcome.start = self._now()
        try:
            async with aclosing(self.client.stream(prompt, outcome.requested_len)) as chunks:
                async for chunk in chunks:
                    if chunk.num_tokens != 0:
                        outcome.arrivals.append(self._now())
                        outcome.counts.append(chunk.num_tokens)
                    outcome.input_len = chunk.input_len or outcome.input_len
                    outcome.output_len = chunk.output_len or outcome.output_len
        except RequestFailed as failure:
            outcome.error = str(failure)
        else:
            _settle(outcome)

    def _now(self) -> float:
        return time.perf_counter() - self._origin


def _settle(outcome: Outcome) -> None:
    """Count the answer where the server did not."""
    if not outcome.arrivals:
        outcome.error = "the answer had no tokens"
    if not outcome.output_len:
        outcome.output_len = sum(1 if count is None else count for count in outcome.counts)
