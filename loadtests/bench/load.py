"""Load generator: sends each planned request at its time and records when replies arrive."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from penstock.loadtests.bench.clients import Client, Prompt, RequestFailed
from penstock.loadtests.bench.metrics import Outcome
from penstock.loadtests.bench.workload import Planned, Prompts


@dataclass(slots=True)
class Load:
    """A load to run. The results are in `outcomes`, `duration` and `interrupted` after `run`."""

    client: Client
    prompts: Prompts
    plan: Sequence[Planned]  # planned requests, sorted by `due`
    concurrency: int | None = None  # maximum requests in flight, or None without a limit
    on_done: Callable[[Outcome], None] = lambda _: None
    # Outcomes of the requests, in the order of completion.
    outcomes: list[Outcome] = field(default_factory=list)
    duration: float = 0.0  # seconds
    interrupted: bool = False
    _origin: float = 0.0  # perf_counter at the start of the load, the origin of all other times

    async def run(self) -> None:
        """Run until all requests have finished or the task is cancelled.

        After a cancellation, `outcomes` contains only the requests that had already finished.
        """
        self._origin = time.perf_counter()
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._release(tasks)
        except asyncio.CancelledError:
            self.interrupted = True  # asyncio.Runner cancels the main task after Ctrl-C
        self.duration = self._now()

    async def _release(self, tasks: asyncio.TaskGroup) -> None:
        """Start each request when it is due and one of the `concurrency` slots is free.

        The task of a request is created only when the request gets a slot, so that waiting requests
        use no CPU time.
        """
        slots = asyncio.Semaphore(self.concurrency or len(self.plan))
        full_until = 0.0
        for planned in self.plan:
            await asyncio.sleep(max(0.0, planned.due - self._now()))
            # Waiting for a slot does not count as lag of the client.
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
        await self._send(planned.text or self.prompts.tokens(planned), outcome)
        self.outcomes.append(outcome)
        self.on_done(outcome)

    async def _send(self, prompt: Prompt, outcome: Outcome) -> None:
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
    """Count the answer's tokens if the server did not report their number.

    Sets an error if the answer has no tokens.
    """
    if not outcome.arrivals:
        outcome.error = "the answer had no tokens"
    if not outcome.output_len:
        outcome.output_len = sum(1 if count is None else count for count in outcome.counts)
