"""Responses with the answers of a call: a stream of server-sent events, or one JSON object."""

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from time import monotonic
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.router.api.connection import BODY_WRITER, BodyWriter
from penstock.router.api.generation.sending import (
    NO_HEADERS,
    no_headers,
    send_event,
    send_json,
)
from penstock.router.api.http import error_response
from penstock.router.errors import ServingError
from penstock.router.requests.response_stream import (
    AnswerBuilder,
    ClientDisconnectedError,
    Delta,
    ResponseStream,
)
from penstock.router.requests.slices import Slices, release

KEEP_ALIVE_SECONDS = 10.0

TOKENS_PER_SLICE = 256
"""Number of tokens whose logprobs are freed without a pause."""

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class ResponseFormatter(Protocol):
    """A formatter of a call's answers in the format of one API."""

    @property
    def token_chunk(self) -> Callable[[int, int, str], bytes | None]:
        """Return a function that makes the chunk for a token that only adds text.

        The function's arguments are the request's index, the choice and the text. It returns None
        if `chunk` must make the events for the token, and empty bytes if there is nothing to send
        yet. It must be fast, because it is called for most tokens.
        """
        ...

    def full_response(self, deltas: Sequence[Delta]) -> Iterator[str]:
        """Yield the complete response.

        `deltas` has one item per choice, in the order of the prompts.
        """
        ...

    def chunk(self, delta: Delta) -> Iterator[str]:
        """Yield the server-sent events for a delta; `token_chunk` is faster for one token."""
        ...

    def end_of_stream(self) -> str:
        """Return the events that end a stream: usage, if requested, and the end marker."""
        ...

    def error_events(self, error: ServingError) -> Iterator[str]:
        """Yield the events that end a stream with an error, in fragments."""
        ...


class Answers:
    """The answers of a call, merged per choice as their deltas arrive."""

    def __init__(self) -> None:
        self._builders: dict[tuple[int, int], AnswerBuilder] = {}
        self._merged: list[Delta] = []

    def add(self, delta: Delta) -> None:
        self._builders.setdefault((delta.index, delta.choice), AnswerBuilder()).add(delta)

    async def merged(self) -> list[Delta]:
        """Return one delta per choice, in order of prompts and choices."""
        slices = Slices()
        for name in sorted(self._builders):
            self._merged.append(self._builders[name].build())
            await slices.pause()
        return self._merged

    async def release(self) -> None:
        """Free the answers in slices, also the list that `merged` has returned.

        Freeing 46,000 logprobs with 20 alternatives each takes 45 ms, and 4,096 answers 8 ms.
        """
        slices = Slices()
        while self._builders:
            _, builder = self._builders.popitem()
            while builder.free_logprobs(TOKENS_PER_SLICE):
                await slices.pause()
            await slices.pause()
        await release(self._merged)


class GenerationResponse(Response):
    """A streamed or complete response; its requests are canceled if the client disconnects.

    Args:
        deltas: the answers.
        formatter: formats the answers.
        request_id: sent in the header `x-request-id`.
        stream: whether to send server-sent events instead of one JSON object.
        refusal: makes the error response if the call fails before its first tokens.
        headers: further headers.
        keep_alive: returns the events to send after each `KEEP_ALIVE_SECONDS` without an event,
            even if tokens arrive that cause no event. None if a stream must not begin before its
            first token.
        late_headers: called when the headers of a successful response are sent; returns further
            headers.
        prompts: the token ids of each prompt, which the response frees at its end. Freeing 1,024
            prompts of 4 KiB takes 15 ms.
    """

    def __init__(
        self,
        deltas: ResponseStream,
        formatter: ResponseFormatter,
        request_id: str,
        stream: bool,
        refusal: Callable[[ServingError], Response] = error_response,
        headers: Mapping[str, str] = NO_HEADERS,
        keep_alive: Callable[[], str] | None = None,
        late_headers: Callable[[], Mapping[str, str]] = no_headers,
        prompts: list[Sequence[int]] | None = None,
    ) -> None:
        self._deltas = deltas
        self._formatter = formatter
        self._own_headers = {"x-request-id": request_id, **headers}
        self._stream = stream
        self._refusal = refusal
        self._keep_alive = keep_alive if stream else None
        self._late_headers = late_headers
        self._prompts = [] if prompts is None else prompts
        self._has_begun = False
        self._sent_at = 0.0
        self._slices = Slices()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body: BodyWriter = scope["extensions"][BODY_WRITER]
        body.watch(self._deltas.close)
        answers = Answers()
        self._sent_at = monotonic()
        try:
            # A call that fails before its first tokens gets an error status, so wait for them.
            first = await self._next_delta(send)
            if self._stream:
                await self._send_stream(first, send, body)
                return
            await self._read_answers(first, answers)
        except ServingError as error:
            if self._has_begun:
                last = self._formatter.error_events(error)
                await send_event(send, last, self._slices, is_last=True)
                return
            response = self._refusal(error)
            response.headers.update(self._own_headers)
        except ClientDisconnectedError:
            return
        else:
            whole = self._formatter.full_response(await answers.merged())
            headers = {**self._own_headers, **self._late_headers()}
            await send_json(send, whole, headers, lambda: not self._deltas.has_failed)
            return
        finally:
            body.unwatch()
            self._deltas.close()
            await answers.release()
            await release(self._prompts)
            await self._deltas.release_prompt_logprobs()
        await response(scope, receive, send)

    async def _next_delta(self, send: Send, writer: "_EventWriter | None" = None) -> Delta:
        """Return the next delta. While waiting for it, send the events of `keep_alive`, if set.

        Args:
            send: ASGI's `send`; the status is sent before the first event.
            writer: writes events while this method waits.

        Raises:
            StopAsyncIteration: all answers have ended.
        """
        if self._keep_alive is None:
            return await anext(self._deltas)
        while True:
            sent_at = self._sent_at if writer is None else max(self._sent_at, writer.written_at)
            seconds = sent_at + KEEP_ALIVE_SECONDS - monotonic()
            if seconds <= 0:
                await self._begin(send)
                await self._send_events(send, (self._keep_alive(),))
                continue
            try:
                async with asyncio.timeout(seconds):
                    return await anext(self._deltas)
            except TimeoutError:
                pass  # the writer may have written events while this method waited

    async def _send_events(self, send: Send, fragments: Iterable[str]) -> None:
        """Send events that do not end the stream."""
        if await send_event(send, fragments, self._slices):
            self._sent_at = monotonic()

    async def _begin(self, send: Send) -> None:
        """Send the status and the headers of a stream, if they were not sent yet."""
        if self._has_begun:
            return
        self._has_begun = True
        own = {**self._own_headers, **self._late_headers()}
        headers = [*STREAM_HEADERS, *((name.encode(), own[name].encode()) for name in own)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _read_answers(self, first: Delta, answers: Answers) -> None:
        answers.add(first)
        slices = Slices()
        async for delta in self._deltas:
            answers.add(delta)
            await slices.pause()

    async def _send_stream(self, first: Delta, send: Send, body: BodyWriter) -> None:
        await self._begin(send)
        await self._send_events(send, self._formatter.chunk(first))
        is_timed = self._keep_alive is not None
        writer = _EventWriter(body, self._formatter, self._deltas, is_timed)
        self._deltas.writer = writer.write
        last: Iterable[str]
        try:
            delta = await self._next_delta(send, writer)
            while not self._deltas.has_ended:
                await self._send_events(send, self._formatter.chunk(delta))
                delta = await self._next_delta(send, writer)
            last = self._ending(delta)
        except StopAsyncIteration:
            last = (self._formatter.end_of_stream(),)
        except ServingError as error:
            last = self._formatter.error_events(error)
        await send_event(send, last, self._slices, is_last=True)

    def _ending(self, last: Delta) -> Iterator[str]:
        """Yield the events of the last delta and of the end of a stream."""
        yield from self._formatter.chunk(last)
        yield self._formatter.end_of_stream()


class _EventWriter:
    """Writes a stream's tokens as server-sent events, without a task switch.

    Args:
        body: the body of the response.
        formatter: makes the events.
        deltas: the answers of the call, which fails if an event cannot be written.
        is_timed: whether to set `written_at`.

    Attributes:
        written_at: time at which the latest events were written.
    """

    __slots__ = ("_body", "_chunk", "_deltas", "_is_timed", "written_at")

    def __init__(
        self,
        body: BodyWriter,
        formatter: ResponseFormatter,
        deltas: ResponseStream,
        is_timed: bool,
    ) -> None:
        self._body = body
        self._chunk = formatter.token_chunk
        self._deltas = deltas
        self._is_timed = is_timed
        self.written_at = 0.0

    def write(self, index: int, choice: int, position: int, token: int, text: str) -> bool:
        """Send a token immediately (a `TokenWriter`)."""
        body = self._body
        try:
            chunk = None if body.flow.write_paused else self._chunk(index, choice, text)
            if chunk is None:
                return False
            if chunk:  # an empty chunk would mark the end of the HTTP body
                body.write_chunk(chunk)
                if self._is_timed:
                    self.written_at = monotonic()
        # An error of one call must not end the worker's stream, which serves all calls.
        except Exception as error:
            self._deltas.fail(error)
        return True
