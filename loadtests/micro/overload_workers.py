"""Stub workers with a bounded number of sequences, for measurements of overload.

`python -m penstock.loadtests.micro.overload_workers` is like `stub_workers`, but a worker runs at
most `--max-sequences` sequences. Further sequences wait in its queue until a step ends. A prompt is
computed in one step, within the step's budget of tokens, and the first token comes at the end of
that step.
"""

import asyncio
import dataclasses
import json
import sys
import time
from collections import deque
from collections.abc import Sequence

import uvloop

from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.micro.stub_workers import Run, Session, StubWorker
from penstock.protos import worker_pb2 as pb
from penstock.protos.worker_codec import num_prompt_tokens


class BoundedWorker(StubWorker):
    """A worker that limits its sequences and the prompt tokens of each step."""

    def __init__(self, name: str, options: "WorkerOptions") -> None:
        super().__init__(name, options.step_ms / 1000)
        self.options = options
        self.num_steps = 0
        self.num_prompt_tokens = 0  # number of prompt tokens that the worker has computed
        self.prompt_seconds = 0.0

    def session(self, router: str) -> "BoundedSession":
        return BoundedSession(self, router)

    def load(self) -> pb.Load:
        load = super().load()
        waiting = [
            run
            for session in self.sessions
            if isinstance(session, BoundedSession)
            for run in session.waiting
        ]
        load.queued = len(waiting)
        load.queued_tokens = sum(num_prompt_tokens(run.submit) for run in waiting)
        load.step_micros = round(self.step_seconds * 1e6)
        load.steps = self.num_steps
        load.step_seconds = self.num_steps * self.step_seconds
        load.prompt_tokens_computed = self.num_prompt_tokens
        load.prompt_seconds = self.prompt_seconds
        return load

    def welcome(self) -> pb.Welcome:
        welcome = super().welcome()
        welcome.max_sequences = self.options.max_sequences
        return welcome


class BoundedSession(Session):
    """A session with the router that also queues the sequences that wait for a free slot.

    The worker has only one session.
    """

    def __init__(self, worker: BoundedWorker, router: str) -> None:
        super().__init__(worker, router)
        self.waiting: deque[Run] = deque()
        self._bounded = worker

    def receive(self, message: pb.ToWorker) -> None:
        super().receive(message)
        if message.WhichOneof("body") == "drop":
            drop = (message.drop.request, message.drop.attempt)
            kept = [run for run in self.waiting if (run.submit.request, run.submit.attempt) != drop]
            self.waiting = deque(kept)

    def submitted(self, submit: pb.Submit) -> None:
        if submit.params.n > 1 or submit.log:
            raise ValueError(
                f"a bounded stub worker supports requests with n = 1 and an empty log, not n = "
                f"{submit.params.n} and a log of {len(submit.log)} entries"
            )
        self.waiting.append(Run(submit, 0, 0))
        self.to_run.set()

    async def step(self) -> None:
        due = time.monotonic()
        while True:
            if not self.runs and not self.waiting:
                self.to_run.clear()
                await self.to_run.wait()
                due = time.monotonic()
            self.admit()
            due += self._bounded.step_seconds
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            self._bounded.num_steps += 1
            if self.runs:
                self.make_step(list(self.runs.values()))

    def admit(self) -> None:
        """Move sequences from the queue into the next step, within the slot and token limits."""
        options, tokens = self._bounded.options, 0
        while self.waiting and len(self.runs) < options.max_sequences:
            prompt = num_prompt_tokens(self.waiting[0].submit)
            if tokens and tokens + prompt > options.max_batched_tokens:
                break
            run = self.waiting.popleft()
            tokens += prompt
            self.runs[run.submit.request, run.submit.attempt, run.choice] = run
        if tokens:
            self._bounded.num_prompt_tokens += tokens
            self._bounded.prompt_seconds += self._bounded.step_seconds


@dataclasses.dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Settings of the workers."""

    count: int = option(2, "number of workers")
    max_sequences: int = option(32, "most running sequences of a worker")
    max_batched_tokens: int = option(512, "most prompt tokens per step")
    step_ms: float = option(40.0, "step time in milliseconds")


async def _serve(given: WorkerOptions) -> None:
    workers = [BoundedWorker(f"mixed-{number}", given) for number in range(given.count)]
    for worker in workers:
        await worker.start()
    print(json.dumps({worker.name: worker.address for worker in workers}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main(arguments: Sequence[str] | None = None) -> int:
    program = "python -m penstock.loadtests.micro.overload_workers"
    about = "Workers without a model that run a bounded number of sequences."
    (given,) = read_flags(program, about, (WorkerOptions,), arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
