"""The response stream of a call: deltas of one or more answers until all have ended."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from penstock.protos import worker_pb2
from penstock.router.errors import Code, ServingError
from penstock.router.requests.slices import Slices

MAX_MERGED_TOKENS = 128
"""Maximum number of tokens in a merged delta; with 20 logprobs each, it takes 10 ms to send."""

LOGPROBS_PER_SLICE = 256
"""Number of prompt tokens whose logprobs are freed between two looks at the clock."""


class ClientDisconnectedError(Exception):
    """The client has disconnected, or no longer needs the answer."""


# The class is not frozen, because creating an instance of a frozen class takes 3 times as long.
@dataclass(slots=True)
class Delta:
    """New tokens of one choice and the text that they add."""

    index: int  # index of the request in its call
    choice: int
    position: int  # token index of the first new token
    tokens: Sequence[int]
    text: str
    logprobs: Sequence[worker_pb2.TokenLogprobs | None]
    finish: str = ""  # "stop" or "length" in the last delta, else empty
    stop: str | int | None = None  # the client's stop string or stop token that ended the choice


class AnswerBuilder:
    """Merges the consecutive deltas of one choice, as they arrive."""

    def __init__(self) -> None:
        # The builder keeps no delta, because a delta of many tokens would keep their logprobs.
        self._start: tuple[int, int, int] | None = None  # index, choice and first position
        self._finish = ""
        self._stop: str | int | None = None
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._logprobs: list[worker_pb2.TokenLogprobs | None] = []

    def add(self, delta: Delta) -> None:
        """Append the next delta."""
        if self._start is None:
            self._start = (delta.index, delta.choice, delta.position)
        self._finish, self._stop = delta.finish, delta.stop
        self._tokens.extend(delta.tokens)
        self._texts.append(delta.text)
        self._logprobs.extend(delta.logprobs)

    def build(self) -> Delta:
        """Return one delta for all added deltas. At least one delta must have been added."""
        assert self._start is not None
        text = "".join(self._texts)
        return Delta(*self._start, self._tokens, text, self._logprobs, self._finish, self._stop)

    def free_logprobs(self, max_tokens: int) -> bool:
        """Free the logprobs of up to `max_tokens` tokens; return whether any are left."""
        del self._logprobs[-max_tokens:]
        return bool(self._logprobs)


def slices_of(delta: Delta, max_tokens: int) -> Iterator[Delta]:
    """Split a delta into deltas of at most `max_tokens` tokens.

    The first delta has all of the text. Only the complete answers of ranked calls are longer than
    `MAX_MERGED_TOKENS`. Splitting is safe for these calls, because they cannot be resumed between
    two deltas.
    """
    if len(delta.tokens) <= max_tokens:
        yield delta
        return
    last = (len(delta.tokens) - 1) // max_tokens * max_tokens
    for start in range(0, last + 1, max_tokens):
        end = start + max_tokens
        yield Delta(
            delta.index,
            delta.choice,
            delta.position + start,
            delta.tokens[start:end],
            delta.text if start == 0 else "",
            delta.logprobs[start:end],
            delta.finish if start == last else "",
            delta.stop if start == last else None,
        )


class TokenWriter(Protocol):
    """Sends a token to the client directly, without a switch to the task that reads the stream."""

    def __call__(self, index: int, choice: int, position: int, token: int, text: str) -> bool:
        """Send a token; return False if the client cannot take the token now.

        The token has neither logprobs nor a finish reason. The arguments are those of `Delta`.
        """
        ...


class ResponseStream:
    """The answers of one call, as an asynchronous iterator of deltas.

    Consecutive unread deltas of a choice are merged. If too many tokens are unread, the call fails,
    so that a slow reader never blocks the router.

    A reader may set `writer`. While the reader waits and nothing is unread, `idle_writer` is this
    writer. A token passed to `idle_writer` is sent without waking the reader, while `push` wakes
    the reader.

    Args:
        max_unread: largest number of unread tokens.
        on_cancel: called with the requests to cancel when the call ends early.
    """

    __slots__ = (
        "_error",
        "_max_unread",
        "_num_unread",
        "_on_cancel",
        "_open_requests",
        "_unread",
        "_wake",
        "idle_writer",
        "num_cached",
        "numbers",
        "prompt_logprobs",
        "seeds",
        "writer",
    )

    def __init__(self, max_unread: int, on_cancel: Callable[[Sequence[int]], None]) -> None:
        self.numbers: list[int] = []  # ids of the call's requests, by request index
        self.seeds: list[int] = []  # seeds of the requests, by request index
        # For each request index, the logprobs of all prompt tokens except the first one. The list
        # is complete before the first delta.
        self.prompt_logprobs: dict[int, list[worker_pb2.TokenLogprobs]] = {}
        # For each request index, the number of cached prompt tokens, known before the first delta.
        self.num_cached: dict[int, int] = {}
        self.writer: TokenWriter | None = None
        # Same as `writer` while the reader waits and nothing is unread, else None.
        self.idle_writer: TokenWriter | None = None
        self._max_unread = max_unread
        self._on_cancel = on_cancel
        self._open_requests: set[int] = set()  # requests that have not ended
        self._unread: deque[Delta] = deque()
        self._num_unread = 0
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    @property
    def has_failed(self) -> bool:
        """Whether the call has ended early: by an error, or because the client disconnected."""
        return self._error is not None

    @property
    def has_ended(self) -> bool:
        """Whether all answers were read completely and without an error."""
        return not (self._unread or self._open_requests or self._error)

    def add_request(self, request: int, seed: int) -> None:
        """Add a request of the call; requests must be added in order of their index."""
        self._open_requests.add(request)
        self.numbers.append(request)
        self.seeds.append(seed)

    def push_final(self, answer: Delta) -> None:
        """Append a complete answer, without counting it against the unread limit.

        Nothing is appended to a call that has failed. Its requests may still be running, because
        they are cancelled one after another.
        """
        if self._error is not None:
            return
        self._unread.append(answer)
        self._num_unread += len(answer.tokens)
        self._max_unread += len(answer.tokens)
        self._wake_reader()

    def push(self, delta: Delta) -> None:
        """Append new tokens without waiting; fail the call if too many are unread.

        Nothing is appended to a call that has failed (see `push_final`).
        """
        if self._error is not None:
            return
        self._unread.append(delta)
        self._num_unread += len(delta.tokens)
        self._wake_reader()
        if self._num_unread > self._max_unread:
            self.fail(
                ServingError(
                    Code.OVERLOADED,
                    f"the client read the answer too slowly: more than {self._max_unread} tokens "
                    "were unread",
                )
            )

    def request_ended(self, request: int, error: ServingError | None) -> None:
        """Record the end of a request; an error ends the whole call."""
        self._open_requests.discard(request)
        if error is not None:
            self.fail(error)
        self._wake_reader()

    def drop_unread(self) -> None:
        """Forget the unread deltas of a call that has failed."""
        self._unread.clear()
        self._num_unread = 0

    def free_prompt_logprobs(self, max_tokens: int) -> bool:
        """Free the logprobs of up to `max_tokens` prompt tokens; return whether any are left."""
        if self.prompt_logprobs:
            index, logprobs = self.prompt_logprobs.popitem()
            del logprobs[-max_tokens:]
            if logprobs:
                self.prompt_logprobs[index] = logprobs
        return bool(self.prompt_logprobs)

    async def release_prompt_logprobs(self) -> None:
        """Free the prompt logprobs in slices. Freeing 40,000 of them takes 13 ms."""
        slices = Slices()
        while self.free_prompt_logprobs(LOGPROBS_PER_SLICE):
            await slices.pause()

    def close(self) -> None:
        """End the call and cancel all open requests."""
        self.fail(ClientDisconnectedError())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if not self._open_requests:
                raise StopAsyncIteration
            self._wake.clear()
            self.idle_writer = self.writer
            try:
                await self._wake.wait()
            finally:
                self.idle_writer = None
        return self._next_delta()

    def _wake_reader(self) -> None:
        self.idle_writer = None  # tokens must not overtake the unread deltas
        self._wake.set()

    def _next_delta(self) -> Delta:
        delta = first = self._unread.popleft()
        choice, num_tokens = (first.index, first.choice), len(first.tokens)
        merged: AnswerBuilder | None = None
        while self._unread and (self._unread[0].index, self._unread[0].choice) == choice:
            num_tokens += len(self._unread[0].tokens)
            if num_tokens > MAX_MERGED_TOKENS:
                break
            if merged is None:
                merged = AnswerBuilder()
                merged.add(first)
            merged.add(self._unread.popleft())
        if merged is not None:
            delta = merged.build()
        self._num_unread -= len(delta.tokens)
        return delta

    def fail(self, error: Exception) -> None:
        """Cancel the open requests and end the call with an error.

        The reader gets the unread deltas before the error.
        """
        if self._error is None:
            self._error = error
        left, self._open_requests = sorted(self._open_requests), set()
        self._wake_reader()
        if left:
            self._on_cancel(left)
