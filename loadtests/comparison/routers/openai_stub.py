"""An OpenAI HTTP server without a model, for routers that forward HTTP.

Like the stub worker of our own protocol, it sends the first token of an answer immediately, and
then one token per step to all running streams.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Mapping
from typing import Any, cast

TOKEN = " a"
_MODEL = "stub"
_SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class OpenAiStub:
    """A server of `/v1/completions`. Its answers have exactly `max_tokens` tokens.

    Args:
        step_seconds: time from one step to the next.
    """

    def __init__(self, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.address = ""
        self.streams: set[_Stream] = set()
        self._ids = itertools.count(1)
        self._to_run = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._stepping: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Serve on a free loopback port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Connection(self), "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._stepping = asyncio.create_task(self._step())

    async def stop(self) -> None:
        """Stop the steps and close the server."""
        if self._stepping is not None and self._server is not None:
            self._stepping.cancel()
            self._server.close()

    def answer(
        self, request: Mapping[str, Any], transport: asyncio.Transport, closes: bool
    ) -> None:
        """Start a stream, or send a whole answer if the request does not stream.

        If `closes` is set, the connection is closed after the answer.
        """
        number, length = next(self._ids), int(request.get("max_tokens") or 16)
        if not request.get("stream"):
            transport.write(_json_response(_completion(number, TOKEN * length, "length")))
            return
        stream = _Stream(number, length, transport, closes)
        stream.send(_SSE_HEAD)
        if not stream.ended:
            self.streams.add(stream)
            self._to_run.set()

    async def _step(self) -> None:
        due = time.monotonic()
        while True:
            if not self.streams:
                self._to_run.clear()
                await self._to_run.wait()
                due = time.monotonic()
            due += self.step_seconds
            await asyncio.sleep(max(due - time.monotonic(), 0.0))
            for stream in list(self.streams):
                stream.send()
                if stream.ended:
                    self.streams.discard(stream)


class _Stream:
    """One running answer. Its events are encoded at its start, so that a step only writes bytes."""

    def __init__(
        self, number: int, length: int, transport: asyncio.Transport, closes: bool
    ) -> None:
        self._event = _chunk(_completion(number, TOKEN, None))
        self._last = _chunk(_completion(number, TOKEN, "length")) + _DONE
        self._left = length
        self._transport = transport
        self._closes = closes

    @property
    def ended(self) -> bool:
        return self._left <= 0 or self._transport.is_closing()

    def send(self, before: bytes = b"") -> None:
        """Write `before` and the event of the next token in one call."""
        self._left -= 1
        self._transport.write(before + (self._event if self._left > 0 else self._last))
        if self._left <= 0 and self._closes:
            self._transport.close()


class _Connection(asyncio.Protocol):
    """One connection of a router. Requests are parsed one after the other."""

    def __init__(self, stub: OpenAiStub) -> None:
        self._stub = stub
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            first, *lines = self._received[:end].decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (x.partition(": ") for x in lines)}
            method, path, version = (*first.split(" "), "", "")[:3]
            if not version.startswith("HTTP/1.") or "transfer-encoding" in headers:
                # Reject chunked bodies and HTTP/2. If the stub accepted HTTP/2, sglang-router would
                # take it for a gRPC worker.
                self._transport.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                self._transport.close()
                return
            length = end + 4 + int(headers.get("content-length", "0"))
            if len(self._received) < length:
                return
            body, self._received = self._received[end + 4 : length], self._received[length:]
            self._respond(method, path, body, headers.get("connection", "").lower() == "close")

    def _respond(self, method: str, path: str, body: bytes, closes: bool) -> None:
        if method == "POST" and path == "/v1/completions":
            self._stub.answer(json.loads(body), self._transport, closes)
            return
        # Routers also send health checks and model queries when they start. One reply fits them
        # all.
        models = [{"id": _MODEL, "object": "model", "created": 0, "owned_by": _MODEL}]
        reply = {"object": "list", "data": models, "model_path": _MODEL, "status": "ok"}
        self._transport.write(_json_response(reply))


def _completion(number: int, text: str, finish_reason: str | None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
    return {
        "id": f"cmpl-{number:032x}",
        "object": "text_completion",
        "created": 1700000000,
        "model": _MODEL,
        "choices": [choice],
    }


def _chunk(reply: Mapping[str, Any]) -> bytes:
    """Return a server-sent event as one chunk of a chunked response."""
    event = b"data: " + json.dumps(reply, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(event), event)


def _json_response(reply: Mapping[str, Any]) -> bytes:
    body = json.dumps(reply).encode()
    head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
