"""Clients that stream continuously.

Each client sends a new request when its last one has finished.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from random import Random

import aiohttp
import grpc

from penstock.loadtests.chaos.answers import Choice, Scores, Stream
from penstock.loadtests.chaos.request_mix import TOOL_CHOICES, ChaosRequest
from penstock.protos import inference_pb2_grpc

ANSWER_SECONDS = 180.0  # time limit of one call, including delays by faults
PAUSE_SECONDS = 0.1  # seconds between a failed call and its retry
RECONNECT_SECONDS = 5.0  # time within which clients connect to a router that is ready again

_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.use_local_subchannel_pool", 1),
)


def router_was_down(began: float, killed: Sequence[float], ready: Sequence[float]) -> bool:
    """Return whether a call that began at `began` may have failed because no router ran.

    This holds until `RECONNECT_SECONDS` after the next router is ready, since a client connects
    again after a pause.

    Args:
        killed: times at which the router was killed.
        ready: times at which a router became ready.
    """
    up_again = (min((at for at in ready if at > down), default=math.inf) for down in killed)
    return any(up > began - RECONNECT_SECONDS for up in up_again)


class Clients:
    """All clients of the test. All of them use the same router, over gRPC or HTTP.

    Args:
        grpc_address: host:port of the gRPC API.
        http_address: host:port of the HTTP API, for requests that call tools.
        may_retry: called with the start time of a failed call; returns whether the call may be
            retried, because its router was killed.
    """

    def __init__(
        self, grpc_address: str, http_address: str, may_retry: Callable[[float], bool]
    ) -> None:
        # Streams of the requests, in the order in which they started.
        self.streams: list[Stream] = []
        self._may_retry = may_retry
        self._channel = grpc.aio.insecure_channel(grpc_address, options=_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)  # type: ignore[no-untyped-call]
        self._chats = f"http://{http_address}/v1/chat/completions"
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS),
            connector=aiohttp.TCPConnector(limit=0),
        )
        self._ending = False
        self._tasks: list[asyncio.Task[None]] = []

    async def one(self, request: ChaosRequest, name: str, **more: int) -> Stream:
        """Send one request and return its answer. `more` overrides sampling parameters."""
        stream = Stream(name, request, time.time())
        self.streams.append(stream)
        uses_http = request.kind in TOOL_CHOICES
        while not await (self._chat(stream) if uses_http else self._call(stream, more)):
            for choice in stream.choices.values():
                choice.restart()
            await asyncio.sleep(PAUSE_SECONDS)
        stream.ended = time.time()
        return stream

    async def all_once(self, requests: Sequence[ChaosRequest]) -> list[Stream]:
        """Send every request once, at most 4 at a time, and return the answers."""
        slots = asyncio.Semaphore(4)

        async def one(request: ChaosRequest) -> Stream:
            async with slots:
                return await self.one(request, f"right-{request.number}")

        return list(await asyncio.gather(*map(one, requests)))

    def start(self, count: int, requests: Sequence[ChaosRequest], seed: int) -> None:
        """Start `count` clients, which run until `finish` is called."""
        self._tasks = [
            asyncio.create_task(
                self._run_client(number, requests, Random(f"client {seed} {number}"))
            )
            for number in range(count)
        ]

    async def finish(self) -> None:
        """Stop sending new requests, and wait until the running requests have finished."""
        self._ending = True
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self._session.close()
        await self._channel.close()

    async def _run_client(self, client: int, requests: Sequence[ChaosRequest], rng: Random) -> None:
        number = 0
        while not self._ending:
            number += 1
            await self.one(rng.choice(requests), f"c{client}-{number}")

    async def _call(self, stream: Stream, more: dict[str, int]) -> bool:
        """Send the request and record its replies. Return False if the call must be retried."""
        began = time.time()
        call = self._stub.Generate(
            stream.request.message(stream.name, **more), timeout=ANSWER_SECONDS
        )
        try:
            async for reply in call:
                stream.take(reply, time.time())
        except grpc.aio.AioRpcError as error:
            if self._may_retry(began):
                return False
            stream.error = f"{error.code().name}: {error.details()}"
        else:
            if not all(choice.finish for choice in stream.choices.values()):
                stream.error = "the server ended the stream before the answer was complete"
        finally:
            call.cancel()
        return True

    async def _chat(self, stream: Stream) -> bool:
        """Send over HTTP a request that calls tools, and record its answer.

        Like `_call`, this returns False if the call must be retried.
        """
        began = time.time()
        try:
            error = await self._read_chunks(stream)
        except (aiohttp.ClientError, TimeoutError, OSError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        if error and self._may_retry(began):
            return False
        if not error and not all(choice.finish for choice in stream.choices.values()):
            error = "the server ended the stream before the answer was complete"
        stream.error = error
        return True

    async def _read_chunks(self, stream: Stream) -> str:
        """Send a chat and record its chunks. Return the error that ended it, or ""."""
        headers = {"x-request-id": stream.name}
        body = stream.request.body()
        async with self._session.post(self._chats, json=body, headers=headers) as response:
            if response.status != 200:
                return f"{response.status}: {await response.text()}"
            async for line in response.content:
                data = line[5:].strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    return ""
                if data:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        return str(chunk["error"])
                    stream.take_chunk(chunk, time.time())
        return "the stream ended without [DONE]"

    async def scores(
        self, request: ChaosRequest, choice: int, position: int, count: int
    ) -> Scores | None:
        """Send the request again, and return the log probabilities at one position of its answer.

        Returns None if the new answer does not have this position.

        Args:
            count: number of top tokens to include.
        """
        stream = await self.one(request, f"judge-{request.number}", logprobs=count)
        found = stream.choices.get(choice, Choice()).scores
        return found[position] if position < len(found) else None
