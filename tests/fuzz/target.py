"""The routers and stub workers of a fuzz run, and the checks of their answers."""

import asyncio
import contextlib
import logging
import re
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from penstock.protos import worker_pb2 as pb
from penstock.router.api.admin import admin_app
from penstock.router.api.openai.routes import openai_app
from penstock.router.config import RouterConfig
from tests.fuzz.inputs import GrpcInput, Input, RawInput
from tests.fuzz.strategies import ORIGIN, USER, WORKERS, HttpRoute
from tests.support.api_keys import EVERY_ROLE, user_keys
from tests.support.callback_times import CallbackTimes
from tests.support.served_router import Served, serving
from tests.support.stub_worker import END_TOKEN, StubWorker

MAX_CALLBACK_SECONDS = 0.05
"""CPU time in seconds that one callback of a router may take."""
STALL_SECONDS = 60.0
"""Time limit of each call and of each wait; an input that exceeds this limit has a problem."""
MAX_LEFT = 24
"""Largest number of connections that are left open at a time."""
MODEL_LEN = 128
COMPANION_TOKENS = 96

STATUS_LINE = re.compile(rb"HTTP/1\.1 ([0-9]{3}) ")
DOCUMENTED = {503, 504}
"""The HTTP status codes above 499 that a router may return."""
BAD_CODES = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS}
OF_CLIENT = "Internal error from Core"
"""Error of gRPC's client for a call that ended while the client was sending."""
BACKGROUND = b'"background": true'
LEAKS = (b"Traceback", b'File "', str(Path.cwd()).encode())


def answer(prompt: Sequence[int]) -> list[int]:
    """Return a short answer that depends on the prompt; the companion stream gets a long answer."""
    length = COMPANION_TOKENS if list(prompt[:3]) == [7, 8, 9] else 3 + sum(prompt) % 5
    return [6 + (sum(prompt) + 7 * index) % 300 for index in range(length)]


class Records(logging.Handler):
    """The warnings, errors and tracebacks that were logged."""

    def __init__(self) -> None:
        super().__init__(logging.NOTSET)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or record.exc_info:
            shown = logging.Formatter().format(record)
            self.found.append(f"logged {record.levelname} of {record.name}: {shown[-2000:]}")


@dataclass
class Left:
    """A connection that a client has left open, and the bytes that the router has sent."""

    given: RawInput
    writer: asyncio.StreamWriter
    reading: asyncio.Task[None]
    received: bytearray


@dataclass
class Target:
    """A served router, and the state of its fuzz run; `reached` has counts by route and status."""

    served: Served
    channel: grpc.aio.Channel
    times: CallbackTimes
    records: Records
    reached: Counter[str] = field(default_factory=Counter)
    left: deque[Left] = field(default_factory=deque)
    companion: asyncio.Task[bytes] | None = None
    expected: bytes = b""
    # Problems on connections that were left open.
    late: list[tuple[Input, str]] = field(default_factory=list)

    @property
    def routes(self) -> list[HttpRoute]:
        """All routes of both HTTP ports."""
        frontend = self.served.router.frontend
        found: list[HttpRoute] = []
        for port, app in (("http", openai_app(frontend)), ("admin", admin_app(frontend))):
            routes: list[Any] = app.routes
            for route in routes:
                for method in route.methods:
                    found.append(HttpRoute(port, method, route.path))  # type: ignore[arg-type]
        return found

    # ------------------------------------------------------------ one input

    async def check(self, given: Input) -> str:
        """Send an input; return the problem that it caused, or an empty string."""
        try:
            async with asyncio.timeout(STALL_SECONDS):
                if isinstance(given, GrpcInput):
                    problem = await self._call(given)
                else:
                    problem = await self._connect(given)
        except TimeoutError:
            return f"the answer did not end within {STALL_SECONDS:g} s"
        return problem or await self._quiet() or self._noticed()

    def _noticed(self) -> str:
        problems = [f"a callback held the event loop: {slow}" for slow in self.times.slow]
        problems += self.records.found
        self.times.slow.clear()
        self.records.found.clear()
        return "; ".join(problems)

    async def _quiet(self) -> str:
        """Wait until only the companion's request is left; return a problem, or an empty string."""
        for worker in self.served.workers:
            worker.submits.clear()
            worker.drops.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STALL_SECONDS / 2):
                while self._num_left():
                    await asyncio.sleep(0)
                return ""
        return f"requests are left: {self._shown_left()}"

    @property
    def is_spoiled(self) -> bool:
        """True if a problem has left some state, so that later inputs may fail too."""
        return bool(self._num_left() or self.late)

    def _num_left(self) -> int:
        of_companion = int(self.companion is not None and not self.companion.done())
        frontend = self.served.router.frontend
        known = max(frontend.num_open_requests, frontend._dispatcher.num_requests)
        running = sum(len(worker.runs) for worker in self.served.workers)
        return max(known - of_companion, running - of_companion, 0)

    def _shown_left(self) -> str:
        frontend = self.served.router.frontend
        running = [len(worker.runs) for worker in self.served.workers]
        states = frontend._dispatcher._requests.states.values()
        prompts = [list(state.request.prompt)[:20] for state in states]
        return (
            f"{frontend.num_open_requests} of clients, {frontend._dispatcher.num_requests} of the "
            f"dispatcher, {running} of workers, with the prompts {prompts}"
        )

    @contextlib.asynccontextmanager
    async def _paused(self) -> AsyncIterator[None]:
        """Pause the workers, so that a request ends only because its client has disconnected."""
        # Send a request and wait for its answer: the router has then read everything sent earlier.
        await _exchange(self.served, b"GET /version", b"")
        await self._quiet()
        for worker in self.served.workers:
            worker.stepping.clear()
        try:
            yield
        finally:
            for worker in self.served.workers:
                worker.stepping.set()

    # ------------------------------------------------------------ HTTP

    async def _connect(self, given: RawInput) -> str:
        router = self.served.router
        address = {"http": router.http_address, "admin": router.admin_address}.get(
            given.port, router.grpc_address
        )
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        received = bytearray()
        if given.ending == "close":
            async with self._paused():
                await self._send(writer, given.pieces)
                writer.transport.abort()
                if BACKGROUND in b"".join(given.pieces):
                    return ""  # a background response continues without its client
                return await self._quiet()
        reading = asyncio.create_task(_read_all(reader, received))
        await self._send(writer, given.pieces)
        if given.ending == "leave":
            self.left.append(Left(given, writer, reading, received))
            return self._close_left(MAX_LEFT)
        await reading
        writer.close()
        return self._judge(given, received)

    async def _send(self, writer: asyncio.StreamWriter, pieces: Sequence[bytes]) -> None:
        for piece in pieces:
            writer.write(piece)
            for _ in range(4):  # let the router read this piece before the next one is sent
                await asyncio.sleep(0)

    def _close_left(self, most: int) -> str:
        """Close the oldest open connections until `most` remain."""
        problem = ""
        while len(self.left) > most:
            left = self.left.popleft()
            left.reading.cancel()
            left.writer.transport.abort()
            if found := self._judge(left.given, left.received):
                self.late.append((left.given, found))
                problem = found
        return problem

    def _judge(self, given: RawInput, received: bytes | bytearray) -> str:
        statuses = [int(status) for status in STATUS_LINE.findall(received)]
        if given.label:
            for status in statuses:
                self.reached[f"{given.label} {status}"] += 1
        if given.ending == "read" and not statuses:
            return "the router closed the connection without an answer"
        if bad := [each for each in statuses if each >= 500 and each not in DOCUMENTED]:
            return f"status {bad[0]}: {bytes(received[-500:])!r}"
        if leaks := [leak for leak in LEAKS if leak in received]:
            return f"the answer contains {leaks[0]!r}"
        return ""

    # ------------------------------------------------------------ gRPC

    async def _call(self, given: GrpcInput) -> str:
        if len(given.messages) == 1:
            sent: Any = given.messages[0]
            method = self.channel.unary_stream(given.method)
        else:
            sent, method = iter(given.messages), self.channel.stream_stream(given.method)
        call = method(sent, metadata=given.metadata, timeout=given.timeout)
        if given.ending == "cancel":
            async with self._paused():
                for _ in range(20):
                    await asyncio.sleep(0)
                call.cancel()
                await _end_of(call)
                return await self._quiet()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            await call.read()
            if given.ending == "read":
                while await call.read() is not grpc.aio.EOF:
                    pass
        if given.ending == "one":
            call.cancel()
        code, details = await _end_of(call)
        self.reached[f"{given.method} {code.name}"] += 1
        if code in BAD_CODES and details != OF_CLIENT:
            return f"status {code.name}: {details}"
        if leaks := [leak for leak in LEAKS if leak.decode() in details]:
            return f"the details contain {leaks[0]!r}"
        return ""

    # ------------------------------------------------------------ the companion

    async def swap_companion(self) -> str:
        """Check `/health` and the companion (a stream beside the inputs); begin a new stream."""
        problem = ""
        if self.companion is not None:
            problem = await self._compare(self.companion)
        self.companion = None
        problem = problem or await self._quiet() or self._noticed()
        health = await self._bounded(_exchange(self.served, b"GET /health", b""))
        if not health.startswith(b"HTTP/1.1 200 "):
            problem = problem or f"/health answers {health!r}"
        self.companion = asyncio.create_task(_companion(self.served))
        return problem

    async def _compare(self, companion: asyncio.Task[bytes]) -> str:
        received = await self._bounded(companion)
        return "" if received == self.expected else f"another stream has changed: {received!r}"

    async def _bounded(self, work: Awaitable[bytes]) -> bytes:
        try:
            async with asyncio.timeout(STALL_SECONDS):
                return await work
        except TimeoutError:
            return b"(no answer)"

    async def settle(self) -> str:
        """Close all connections and wait for the last requests; return the first problem."""
        problem = await self.swap_companion()
        problem = problem or self._close_left(0)
        if self.companion is not None:
            problem = problem or await self._compare(self.companion)
            self.companion = None
        return problem or await self._quiet() or self._noticed()


async def _end_of(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), str(await call.details() or "")


async def _read_all(reader: asyncio.StreamReader, received: bytearray) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            received += data


async def _exchange(served: Served, line: bytes, body: bytes) -> bytes:
    """Send a valid request and return the whole answer."""
    host, port = served.router.http_address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"host: localhost\r\nauthorization: Bearer {USER}\r\ncontent-type: application/json\r\n"
    length = f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    writer.write(line + b" HTTP/1.1\r\n" + (head + length).encode() + body)
    received = bytearray()
    await _read_all(reader, received)
    writer.close()
    return bytes(received)


async def _companion(served: Served) -> bytes:
    """Stream an answer with a fixed seed; return its bytes without ids and times."""
    body = b'{"prompt": [7, 8, 9], "max_tokens": 96, "seed": 7, "stream": true}'
    received = await _exchange(served, b"POST /v1/completions", body)
    events = received.partition(b"\r\n\r\n")[2]
    return re.sub(
        rb'"id":"cmpl-[0-9a-f]+"|"created":[0-9]+|"system_fingerprint":[^,]+', b"", events
    )


class EmptyWorker(StubWorker):
    """A stub that reports that it has cached no blocks; otherwise the router logs warnings."""

    async def _step(self) -> None:
        snapshot = pb.CacheSnapshot(incarnation=self.welcome.incarnation, last=True)
        self.send(pb.ToRouter(cache_snapshot=snapshot))
        await super()._step()


@contextlib.asynccontextmanager
async def target(folder: Path) -> AsyncIterator[Target]:
    """Serve a router with two stub workers and keys, and prepare the companion stream."""
    peers: dict[str, StubWorker] = {}
    workers = [EmptyWorker(name, answer=answer, peers=peers) for name in WORKERS]
    for worker in workers:
        worker.welcome.max_model_len = MODEL_LEN
        worker.welcome.vocab_size = 400
        worker.welcome.eos_tokens[:] = [END_TOKEN]
    config = RouterConfig(
        folder,
        "stub",
        api_keys=(*user_keys(USER), *EVERY_ROLE),
        allowed_origins=(ORIGIN,),
        worker_timeout_seconds=3600.0,
        step_timeout_seconds=3600.0,
    )
    connections = replace(config.connections, linger_seconds=0.05)
    bounds = replace(config.bounds, max_request_cost=4096)
    config = replace(config, connections=connections, bounds=bounds)
    records, times = Records(), CallbackTimes(MAX_CALLBACK_SECONDS)
    root = logging.getLogger()
    async with contextlib.AsyncExitStack() as stack:
        served = await stack.enter_async_context(serving(config, *workers))
        channel = await stack.enter_async_context(
            grpc.aio.insecure_channel(
                served.router.grpc_address, [("grpc.use_local_subchannel_pool", 1)]
            )
        )
        found = Target(served, channel, times, records)
        found.expected = await _companion(served)
        assert found.expected.count(b"data: ") > COMPANION_TOKENS / 2, found.expected
        root.addHandler(records)
        stack.callback(root.removeHandler, records)
        stack.enter_context(times.measuring())
        yield found
