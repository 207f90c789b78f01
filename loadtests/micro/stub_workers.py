"""Stub workers without a model. One process can run any number of them.

`python -m penstock.loadtests.micro.stub_workers` runs workers that use the real stream protocol
with any number of routers. Their token ids encode the time at which they were generated (`age_of`).
The process prints the workers' addresses as one line of JSON, and exits when stdin is closed.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence

import grpc.aio
import uvloop

from penstock.loadtests.bench.flags import option, read_flags
from penstock.protos import worker_pb2 as pb
from penstock.protos import worker_pb2_grpc
from penstock.protos.worker_codec import PROTOCOL, TOKEN_BYTES

_UNIT_NANOS = 50_000
_SPAN = 1 << 15  # number of 50 µs units (1.6 s) after which token ids repeat
_HEARTBEAT_SECONDS = 0.5
_NUM_BLOCKS = 16384

Requests = AsyncIterator[pb.ToWorker]


def token_of_now() -> int:
    """Return a token id that encodes the current monotonic time.

    All processes of a machine share this clock.
    """
    return time.monotonic_ns() // _UNIT_NANOS % _SPAN


def age_of(token: int) -> float:
    """Return the seconds since a token was generated, in steps of 50 µs, modulo 1.6 s."""
    return (token_of_now() - token) % _SPAN * _UNIT_NANOS / 1e9


@dataclasses.dataclass(slots=True)
class Run:
    """One running choice of a submitted request."""

    submit: pb.Submit
    choice: int
    position: int  # index of the next token in the answer


class StubWorker(worker_pb2_grpc.WorkerServicer):
    """A stub worker with the role "mixed".

    The worker sends an answer's first token immediately, and then one token per step.

    Args:
        name: the worker's name.
        step_seconds: time from one step to the next.
        token: returns the next token id of a run.
        wanted: bearer token that routers must send, or None for no authentication.
        num_cached: number of cached blocks that the worker reports, with random hashes.
    """

    def __init__(
        self,
        name: str,
        step_seconds: float,
        token: Callable[[Run], int] = lambda run: token_of_now(),
        wanted: str | None = None,
        num_cached: int = 0,
    ) -> None:
        self.name = name
        self.step_seconds = step_seconds
        self.token = token
        self.address = ""
        self.sessions: list[Session] = []
        self._wanted = wanted
        self._num_cached = num_cached
        self._server: grpc.aio.Server | None = None

    @property
    def running(self) -> int:
        """Number of running sequences of all routers together."""
        return sum(len(session.runs) for session in self.sessions)

    def load(self) -> pb.Load:
        running = self.running
        return pb.Load(running=running, free_blocks=max(_NUM_BLOCKS - running, 0))

    async def start(self) -> None:
        """Start the gRPC server on a free loopback port."""
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(grace=None)

    async def Attach(self, requests: Requests, context: grpc.aio.ServicerContext) -> None:
        if self._wanted is not None:
            shown = dict(context.invocation_metadata() or ()).get("authorization")
            if shown != f"Bearer {self._wanted}":
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "invalid bearer token")
        hello = (await anext(aiter(requests))).hello
        session = self.session(hello.router)
        if hello.cache_events:
            for chunk in self._snapshot():
                session.send(pb.ToRouter(cache_snapshot=chunk))
        self.sessions.append(session)
        tasks = [asyncio.create_task(session.write(context)), asyncio.create_task(session.step())]
        try:
            async for message in requests:
                session.receive(message)
        finally:
            self.sessions.remove(session)
            for task in tasks:
                task.cancel()

    def _snapshot(self) -> Iterator[pb.CacheSnapshot]:
        incarnation = self.welcome().incarnation
        if not self._num_cached:
            return iter([pb.CacheSnapshot(incarnation=incarnation, last=True)])
        # Import only if needed, because the import takes seconds.
        from penstock.common.block_hash import HASH_BYTES
        from penstock.workers.scheduling.cache_report import CacheSnapshot
        from penstock.workers.service.cache_stream import encode_snapshot

        numbers = random.Random(self.name)
        hashes = [numbers.randbytes(HASH_BYTES) for _ in range(self._num_cached)]
        return encode_snapshot(CacheSnapshot(0, hashes), incarnation)

    def session(self, router: str) -> "Session":
        """Return a new session for a router's stream."""
        return Session(self, router)

    def welcome(self) -> pb.Welcome:
        return pb.Welcome(
            protocol=PROTOCOL,
            worker=self.name,
            incarnation=f"{self.name}-{id(self):x}",
            role="mixed",
            model="stub",
            layout="stub",
            block_size=16,
            num_blocks=_NUM_BLOCKS + self._num_cached,
            max_model_len=8192,
            max_sequences=256,
            vocab_size=1 << 20,
            load=self.load(),
        )


class Session:
    """The stream to one router, and the runs of the requests that this router submitted."""

    def __init__(self, worker: StubWorker, router: str) -> None:
        self.router = router
        # Running choices by (request, attempt, choice).
        self.runs: dict[tuple[int, int, int], Run] = {}
        self._worker = worker
        self._out: deque[pb.ToRouter] = deque([pb.ToRouter(welcome=worker.welcome())])
        self._to_write = asyncio.Event()
        self.to_run = asyncio.Event()

    def send(self, message: pb.ToRouter) -> None:
        self._out.append(message)
        self._to_write.set()

    async def write(self, context: grpc.aio.ServicerContext) -> None:
        for number in itertools.count(1):
            if not self._out:
                self._to_write.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._to_write.wait(), _HEARTBEAT_SECONDS)
            message = self._out.popleft() if self._out else pb.ToRouter(heartbeat=pb.Heartbeat())
            message.number = number
            await context.write(message)

    def receive(self, message: pb.ToWorker) -> None:
        match message.WhichOneof("body"):
            case "submit":
                self.submitted(message.submit)
            case "drop":
                drop = message.drop
                chosen = drop.choice if drop.HasField("choice") else None
                for key in list(self.runs):
                    if key[:2] == (drop.request, drop.attempt) and chosen in (None, key[2]):
                        del self.runs[key]

    def submitted(self, submit: pb.Submit) -> None:
        new = [Run(submit, choice, 0) for choice in range(max(submit.params.n, 1))]
        over = {entry.choice for entry in submit.log if entry.finished}
        for entry in submit.log:
            new[entry.choice].position = len(entry.tokens) // TOKEN_BYTES
        new = [run for run in new if run.choice not in over]
        for run in new:
            self.runs[submit.request, submit.attempt, run.choice] = run
        self.make_step(new)
        self.to_run.set()

    async def step(self) -> None:
        due = time.monotonic()
        while True:
            if not self.runs:
                self.to_run.clear()
                await self.to_run.wait()
                due = time.monotonic()
            due += self._worker.step_seconds
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            if self.runs:
                self.make_step(list(self.runs.values()))

    def make_step(self, runs: Sequence[Run]) -> None:
        step = pb.Step()
        for run in runs:
            submit = run.submit
            step.request.append(submit.request)
            step.attempt.append(submit.attempt)
            step.choice.append(run.choice)
            step.position.append(run.position)
            step.token.append(self._worker.token(run))
            run.position += 1
            ended = run.position >= submit.params.max_tokens
            step.finish.append(pb.FINISH_LENGTH if ended else pb.FINISH_NONE)
            if ended:
                del self.runs[submit.request, submit.attempt, run.choice]
        step.load.CopyFrom(self._worker.load())
        self.send(pb.ToRouter(step=step))


@dataclasses.dataclass(frozen=True, slots=True)
class StubOptions:
    """Settings of the workers."""

    count: int = option(1, "number of workers")
    first: int = option(0, "number in the name of the first worker")
    step_ms: float = option(20.0, "step time in milliseconds")
    cached_blocks: int = option(0, "cached blocks that each worker reports")


async def _serve(given: StubOptions) -> None:
    workers = [
        StubWorker(f"mixed-{number}", given.step_ms / 1000, num_cached=given.cached_blocks)
        for number in range(given.first, given.first + given.count)
    ]
    for worker in workers:
        await worker.start()
    print(json.dumps({worker.name: worker.address for worker in workers}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


def main(arguments: Sequence[str] | None = None) -> int:
    program, about = "python -m penstock.loadtests.micro.stub_workers", "Workers without a model."
    (given,) = read_flags(program, about, (StubOptions,), arguments)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(given))
    return 0


if __name__ == "__main__":
    sys.exit(main())
