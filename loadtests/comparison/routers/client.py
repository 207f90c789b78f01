"""Reads streamed completions over plain sockets, with little CPU time in the client."""

import asyncio
import json
import re
import time
from dataclasses import dataclass, field
from typing import cast

from penstock.loadtests.comparison.routers.openai_stub import TOKEN
from penstock.loadtests.micro.ab_runner import MeasurementFailed

KEY = "sk-comparison"
"""API key that is sent with every request.

LiteLLM does not start without a key; the other routers ignore it.
"""

_PROMPT = "Tell me a story."
_STREAM_SECONDS = 300.0  # time limit for one stream
_CONTENT = re.compile(rb'"text": ?" ?%b"' % TOKEN.strip().encode())


@dataclass(slots=True)
class Answer:
    """The bytes of one response, and the times of the stream in seconds (`perf_counter`)."""

    start: float = 0.0  # time just before the connection is opened
    first: float = 0.0  # arrival time of the first token
    last: float = 0.0  # arrival time of the last bytes
    data: bytes = b""

    @property
    def ttft(self) -> float:
        return self.first - self.start


@dataclass(slots=True)
class Load:
    """The answers of streams that ran at the same time."""

    answers: list[Answer] = field(default_factory=list)

    def check(self, output_len: int) -> int:
        """Return the number of HTTP chunks of all answers. Raises MeasurementFailed.

        The number is less than that of the tokens if a router forwarded several tokens in one
        write. A router does so when it cannot keep up, and then needs less CPU time per token.
        """
        return sum(check_answer(answer.data, output_len) for answer in self.answers)

    @property
    def streaming_seconds(self) -> float:
        """Seconds from the first token of the first stream to the end of the last stream."""
        return max(each.last for each in self.answers) - min(each.first for each in self.answers)


class _Reader(asyncio.Protocol):
    """Sends one request and collects the response until the server closes the connection."""

    def __init__(self, request: bytes, answer: Answer) -> None:
        self.closed = asyncio.get_running_loop().create_future()
        self._request = request
        self._answer = answer
        self._received: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received.append(data)
        if not self._answer.first and _CONTENT.search(data):
            self._answer.first = time.perf_counter()

    def connection_lost(self, error: Exception | None) -> None:
        self._answer.last = time.perf_counter()
        self._answer.data = b"".join(self._received)
        self.closed.set_result(None)


def request_bytes(address: str, output_len: int) -> bytes:
    """Return the bytes of a streaming request for `output_len` tokens, with `Connection: close`."""
    body = json.dumps(
        {"model": "stub", "prompt": _PROMPT, "max_tokens": output_len, "stream": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n"
    head += f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def read_streams(address: str, streams: int, output_len: int) -> Load:
    """Send `streams` requests at the same time and read the answers. Raises MeasurementFailed."""
    host, port = address.split(":")
    request, load = request_bytes(address, output_len), Load()
    loop = asyncio.get_running_loop()

    async def one() -> None:
        answer = Answer(start=time.perf_counter())
        load.answers.append(answer)
        _, reader = await loop.create_connection(lambda: _Reader(request, answer), host, int(port))
        await reader.closed

    try:
        async with asyncio.timeout(_STREAM_SECONDS):
            await asyncio.gather(*(one() for _ in range(streams)))
    except TimeoutError:
        raise MeasurementFailed(
            f"not all of {streams} streams ended within {_STREAM_SECONDS:g} s"
        ) from None
    return load


def check_answer(response: bytes, output_len: int) -> int:
    """Check a streamed response, and return the number of HTTP chunks that contained its events.

    Raises:
        MeasurementFailed: the events of the response do not have exactly `output_len` tokens, or
            the response lacks a finish reason or the end mark.
    """
    head, _, body = response.partition(b"\r\n\r\n")
    if not head.startswith(b"HTTP/1.1 200 "):
        raise MeasurementFailed(f"a request failed: {response[:300]!r}")
    chunks = dechunked(body) if b"transfer-encoding: chunked" in head.lower() else [body]
    texts, reasons, ended = _events(b"".join(chunks))
    if not ended or not any(reasons):
        missing = "a finish reason" if ended else "`data: [DONE]`"
        raise MeasurementFailed(f"a stream ended without {missing}: {body[-300:]!r}")
    # A router that cannot keep up may put the tokens of several steps into one event.
    text = "".join(texts)
    num_tokens = text.count(TOKEN.strip())
    if num_tokens != output_len or text.replace(" ", "") != TOKEN.strip() * num_tokens:
        raise MeasurementFailed(
            f"a stream had {num_tokens} tokens {TOKEN!r} in {len(text)} characters: "
            f"expected {output_len}"
        )
    return len(chunks)


def dechunked(body: bytes) -> list[bytes]:
    """Return the chunks of a chunked body. The last chunk, which is empty, is left out."""
    chunks, at = [], 0
    while (end := body.find(b"\r\n", at)) >= 0:
        size = int(body[at:end].split(b";")[0] or b"0", 16)
        if not size:
            break
        chunks.append(body[end + 2 : end + 2 + size])
        at = end + 2 + size + 2
    return chunks


def _events(body: bytes) -> tuple[list[str], list[str | None], bool]:
    """Return the texts and finish reasons of a stream's events, and whether it has its end mark."""
    texts, reasons, ended = [], [], False
    for event in body.replace(b"\r\n", b"\n").split(b"\n\n"):
        kind, _, data = event.strip().partition(b":")
        if kind != b"data":
            continue
        if data.strip() == b"[DONE]":
            ended = True
            continue
        for choice in json.loads(data).get("choices", ()):
            texts.append(choice.get("text") or "")
            reasons.append(choice.get("finish_reason"))
    return texts, reasons, ended
