"""A test router: sends messages on a worker's stream and records the worker's messages."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc

from penstock.protos import worker_pb2 as wire
from penstock.protos import worker_pb2_grpc
from penstock.protos.worker_codec import PROTOCOL, pack_tokens

TIMEOUT_SECONDS = 60.0  # limit in seconds that only failing tests reach


def greedy(max_tokens: int, **other: Any) -> wire.SamplingParams:
    """Return greedy sampling parameters that ignore end-of-sequence tokens."""
    params = {"top_p": 1.0, "repetition_penalty": 1.0, "ignore_eos": True, "n": 1, **other}
    return wire.SamplingParams(max_tokens=max_tokens, **params)


class AttachedRouter:
    """A stream to one worker; `answers` and `load` are updated while the stream is open."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self._channel = grpc.aio.insecure_channel(
            address, options=(("grpc.use_local_subchannel_pool", 1),)
        )
        metadata = (("authorization", f"Bearer {token}"),) if token is not None else ()
        stub = worker_pb2_grpc.WorkerStub(self._channel)  # type: ignore[no-untyped-call]
        self.call = stub.Attach(metadata=metadata)
        self.number = 0
        self.welcome = wire.Welcome()
        self.received: list[wire.ToRouter] = []
        # Keys are (request, attempt), or (request, attempt, choice) for choices above 0.
        self.answers: dict[tuple[int, ...], list[int]] = defaultdict(list)
        self.positions: dict[tuple[int, ...], int] = {}  # index of the next token of each answer
        self.finishes: dict[tuple[int, ...], int] = {}
        # Reason of each rejection, by (request, attempt).
        self.rejected: dict[tuple[int, int], str] = {}
        self.load = wire.Load()
        self.closed: grpc.aio.AioRpcError | None = None
        self._changed = asyncio.Condition()
        self._writing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(
        self,
        router: str = "router",
        protocol: int = PROTOCOL,
        heartbeat_seconds: float = 0.2,
        cache_events: bool = False,
    ) -> "AttachedRouter":
        """Send Hello and wait for Welcome; raise AioRpcError if the worker refuses."""
        # If the worker refuses, `send` fails first, and the read below raises the right error.
        with suppress(asyncio.InvalidStateError):
            hello = wire.Hello(protocol=protocol, router=router, incarnation="i")
            hello.cache_events = cache_events
            await self.send(hello=hello)
        first = await self.call.read()
        assert first is not grpc.aio.EOF
        self.welcome, self.load = first.welcome, first.welcome.load
        self.received.append(first)
        self._tasks = [asyncio.create_task(self._read_messages())]
        if heartbeat_seconds:
            self._tasks.append(asyncio.create_task(self._send_heartbeats(heartbeat_seconds)))
        return self

    async def send(self, number: int | None = None, **body: Any) -> None:
        async with self._writing:  # a gRPC call allows one write at a time
            self.number = self.number + 1 if number is None else number
            await self.call.write(wire.ToWorker(number=self.number, **body))

    async def submit(
        self, request: int, prompt: list[int], params: wire.SamplingParams, **other: Any
    ) -> None:
        other.setdefault("attempt", 1)
        packed = pack_tokens(prompt)
        await self.send(submit=wire.Submit(request=request, prompt=packed, params=params, **other))

    async def drop(self, request: int, attempt: int = 1) -> None:
        await self.send(drop=wire.Drop(request=request, attempt=attempt))

    async def until(self, condition: Callable[[], Any]) -> Any:
        """Wait until `condition()` is true and return its value; fail if the stream ends first."""
        async with asyncio.timeout(TIMEOUT_SECONDS), self._changed:
            await self._changed.wait_for(lambda: condition() or self.closed)
        assert condition(), f"the stream ended first: {self.closed}"
        return condition()

    async def until_closed(self) -> grpc.aio.AioRpcError:
        async with asyncio.timeout(TIMEOUT_SECONDS), self._changed:
            await self._changed.wait_for(lambda: self.closed)
        assert self.closed is not None
        return self.closed

    async def answer(self, request: int, attempt: int = 1) -> list[int]:
        """Wait until a request has finished and return its tokens."""
        key = (request, attempt)
        await self.until(lambda: key in self.finishes or key in self.rejected)
        assert key not in self.rejected, self.rejected[key]
        return self.answers[key]

    async def message(self, kind: str, request: int | None = None) -> Any:
        """Wait for the first message of type `kind` (for `request`, if given); return its body."""

        def find() -> Any:
            for message in self.received:
                body = getattr(message, kind)
                if message.HasField(kind) and request in (None, getattr(body, "request", None)):
                    return body
            return None

        return await self.until(find)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self.call.cancel()
        await self._channel.close()

    async def _send_heartbeats(self, seconds: float) -> None:
        # If the stream has ended, `_read_messages` has stored the error.
        with suppress(asyncio.InvalidStateError):
            while True:
                await asyncio.sleep(seconds)
                await self.send(heartbeat=wire.Heartbeat())

    async def _read_messages(self) -> None:
        try:
            while (message := await self.call.read()) is not grpc.aio.EOF:
                await self._handle(message)
        except grpc.aio.AioRpcError as error:
            self.closed = error
        else:
            self.closed = grpc.aio.AioRpcError(grpc.StatusCode.OK, (), ())
        finally:
            self.closed = self.closed or grpc.aio.AioRpcError(grpc.StatusCode.UNKNOWN, (), ())
        async with self._changed:
            self._changed.notify_all()

    async def _handle(self, message: wire.ToRouter) -> None:
        async with self._changed:
            self.received.append(message)
            assert message.number == len(self.received)
            if message.HasField("step"):
                self._record_step(message.step)
            if message.HasField("rejected"):
                rejected = message.rejected
                self.rejected[rejected.request, rejected.attempt] = rejected.reason
            self._changed.notify_all()

    def _record_step(self, step: wire.Step) -> None:
        self.load = step.load
        columns = (step.request, step.attempt, step.choice, step.position, step.token, step.finish)
        for request, attempt, choice, position, token, finish in zip(*columns, strict=True):
            key = (request, attempt, choice) if choice else (request, attempt)
            # The first position of a resumed answer is above 0.
            due = self.positions.get(key, position)
            assert position == due, "a position is missing or repeated"
            self.positions[key] = due + 1
            self.answers[key].append(token)
            if finish:
                self.finishes[key] = finish
