"""Small scripted servers in a thread of this process, for tests of the load generator."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from penstock.protos import inference_pb2, inference_pb2_grpc

START_SECONDS = 30.0  # time limit in seconds for the start or the end of a server


@dataclass
class Behaviour:
    """Behaviour of the stub, and a record of its requests."""

    per_message: int = 1  # number of tokens in each message
    refuse: int = 0  # refuse every n-th request, where n is this value; 0 means none
    refuse_after: int | None = None  # refuse all requests after this number of requests
    break_after: int | None = None  # end an answer with an error after this number of messages
    # Raise an exception in the handler after this number of messages.
    crash_after: int | None = None
    end_after: int | None = None  # cut an answer off after this number of messages, without error
    skip: bool = False  # True: leave out one token position of each answer
    shorter_by: int = 0  # number of tokens by which answers are shorter than max_tokens
    hang: bool = False  # True: never answer a request
    delta_field: str = "content"  # field of a chat event that has the text; "": events lack text
    usage: bool = True
    vocab_size: int = 1000
    max_model_len: int = 4096
    prompts: list[Any] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    in_flight: int = 0
    max_in_flight: int = 0

    def refuses(self) -> bool:
        if self.refuse_after is not None and len(self.prompts) > self.refuse_after:
            return True
        return bool(self.refuse) and len(self.prompts) % self.refuse == 0

    @contextmanager
    def track(self) -> Iterator[None]:
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            yield
        finally:
            self.in_flight -= 1

    def messages(self, max_tokens: int) -> Iterator[tuple[int, int, bool]]:
        """Yield (position, number of tokens, True for the last) of each message."""
        length = max_tokens - self.shorter_by
        for position in range(0, length, self.per_message):
            count = min(self.per_message, length - position)
            yield position, count, position + count == length


class StubInference(inference_pb2_grpc.InferenceServicer):
    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.Model:
        if request.name not in ("", "stub"):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.name!r}")
        return inference_pb2.Model(
            name="stub",
            max_model_len=self.behaviour.max_model_len,
            vocab_size=self.behaviour.vocab_size,
        )

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateReply]:
        behaviour = self.behaviour
        behaviour.prompts.append(request.text or list(request.tokens.ids))
        behaviour.bodies.append(request)
        behaviour.keys.append(dict(context.invocation_metadata()).get("authorization", ""))
        with behaviour.track():
            if behaviour.refuses():
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
            if behaviour.hang:
                await asyncio.sleep(3600)
            max_tokens = request.sampling.max_tokens
            for sent, (position, count, last) in enumerate(behaviour.messages(max_tokens)):
                if sent == behaviour.end_after:
                    return
                if sent == behaviour.crash_after:
                    raise RuntimeError("crashed on purpose")
                if sent == behaviour.break_after:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the server went away")
                await asyncio.sleep(0.001)
                reply = inference_pb2.GenerateReply(
                    position=position + (behaviour.skip and sent > 0), tokens=[7] * count
                )
                if last:
                    reply.finish_reason = "length"
                if last and behaviour.usage:
                    reply.usage.prompt_tokens = len(request.tokens.ids)
                    reply.usage.completion_tokens = position + count
                yield reply


def openai_app(behaviour: Behaviour) -> Starlette:
    """Return an application with OpenAI's API for completions and chats."""

    async def models(_: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "stub", "object": "model"}]})

    async def generate(request: Request) -> Response:
        body = await request.json()
        behaviour.bodies.append(body)
        behaviour.prompts.append(body.get("prompt", body.get("messages")))
        behaviour.keys.append(request.headers.get("authorization", ""))
        if behaviour.refuses():
            return JSONResponse({"error": {"message": "the queue is full"}}, status_code=429)
        return StreamingResponse(_events(behaviour, body), media_type="text/event-stream")

    return Starlette(
        routes=[
            Route("/v1/models", models),
            Route("/v1/completions", generate, methods=["POST"]),
            Route("/v1/chat/completions", generate, methods=["POST"]),
        ]
    )


async def _events(behaviour: Behaviour, body: dict[str, Any]) -> AsyncIterator[str]:
    chat = "messages" in body
    prompt = body["messages"][0]["content"].split() if chat else body["prompt"]
    max_tokens = body["max_completion_tokens"] if chat else body["max_tokens"]
    with behaviour.track():
        if behaviour.hang:
            await asyncio.sleep(3600)
        yield ": a comment keeps the connection alive\n\n"
        if chat:
            yield _event(delta={"role": "assistant", "content": ""})
        for sent, (_, count, last) in enumerate(behaviour.messages(max_tokens)):
            if sent == behaviour.end_after:
                return
            if sent == behaviour.crash_after:
                raise RuntimeError("crashed on purpose")
            if sent == behaviour.break_after:
                yield 'data: {"error": {"message": "the server went away"}}\n\n'
                return
            await asyncio.sleep(0.001)
            text = "x " * count
            delta = {behaviour.delta_field: text} if behaviour.delta_field else {}
            answer: dict[str, Any] = {"delta": delta} if chat else {"text": text}
            yield _event(finish_reason="length" if last and not chat else None, **answer)
        if chat:
            yield _event(delta={}, finish_reason="length")
        if behaviour.usage:
            usage = {
                "prompt_tokens": len(prompt),
                "completion_tokens": max_tokens - behaviour.shorter_by,
            }
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
        yield "data: [DONE]\n\n"


def _event(**choice: Any) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, **choice}]})}\n\n"


@contextmanager
def grpc_stub(behaviour: Behaviour) -> Iterator[str]:
    """Serve gRPC in a thread; yield the address of the server."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    port, done = 0, asyncio.Event()

    async def serve() -> None:
        nonlocal port
        server = grpc.aio.server()
        inference_pb2_grpc.add_InferenceServicer_to_server(  # type: ignore[no-untyped-call]
            StubInference(behaviour), server
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        ready.set()
        await done.wait()
        await server.stop(grace=None)
        # Wait until all calls have ended; otherwise gRPC logs errors at the end of the event loop.
        if rest := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(rest)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    try:
        assert ready.wait(START_SECONDS)
        yield f"grpc://127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(START_SECONDS)
        loop.close()


@contextmanager
def http_stub(behaviour: Behaviour) -> Iterator[str]:
    """Serve HTTP in a thread; yield the address of the server."""
    config = uvicorn.Config(
        openai_app(behaviour),
        port=0,
        log_level="critical",
        lifespan="off",
        timeout_graceful_shutdown=0,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    waited = threading.Event()
    while not server.started and thread.is_alive():
        waited.wait(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(START_SECONDS)
