"""What flows back for one call: deltas of one or several answers, until all have ended."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from penstock.protos import worker_pb2
from penstock.router.errors import Code, ServingError
from penstock.router.routing.events import Deliver, Finish
from penstock.router.text.answer import AnswerText

FINISH_NAMES = {Finish.NONE: "", Finish.STOP: "stop", Finish.LENGTH: "length"}


class ClientGone(Exception):
    """Nobody is there to take the answer."""


@dataclass(slots=True)  # not frozen, which makes it three times as dear: there is one a token
class Delta:
    """Some new tokens of one answer and what they add to its text."""

    index: int  # of the ask in its call
    choice: int
    position: int  # of the first token, in the answer
    tokens: Sequence[int]
    text: str
    logprobs: Sequence[worker_pb2.TokenLogprobs | None]
    finish: str = ""  # "stop" or "length" with the last tokens
    stop: str | int | None = None  # the stop string or the client's stop token that ended it


def join(deltas: Sequence[Delta]) -> Delta:
    """Neighbouring deltas of one choice as one."""
    first, last = deltas[0], deltas[-1]
    return Delta(
        first.index,
        first.choice,
        first.position,
        [token for delta in deltas for token in delta.tokens],
        "".join(delta.text for delta in deltas),
        [entry for delta in deltas for entry in delta.logprobs],
        last.finish,
        last.stop,
    )


class Answers:
    """The answers of one call, as an asynchronous iterator of deltas.

    What a slow reader has not taken yet is joined, and bounded: beyond the bound the call ends with
    an error, and nothing else waits for it.

    Args:
        max_unread: tokens that may wait unread.
        gone: called with the requests that are not wanted any more.
    """

    def __init__(self, max_unread: int, gone: Callable[[Sequence[int]], None]) -> None:
        self.seeds: list[int] = []  # of each ask
        self._max_unread = max_unread
        self._gone = gone
        self._open: set[int] = set()  # requests that have not ended
        self._unread: deque[Delta] = deque()
        self._num_unread = 0
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def opened(self, request: int, seed: int) -> None:
        """One request of the call, in the order of its asks."""
        self._open.add(request)
        self.seeds.append(seed)

    def push(self, delta: Delta) -> None:
        """New tokens, for the reader to take when it can."""
        self._unread.append(delta)
        self._num_unread += len(delta.tokens)
        self._wake.set()
        if self._num_unread > self._max_unread:
            self.fail(
                ServingError(
                    Code.OVERLOADED,
                    f"the answer was read too slowly: more than {self._max_unread} tokens waited",
                )
            )

    def ended(self, request: int, error: ServingError | None) -> None:
        """One request is over; with an error, so is the call."""
        self._open.discard(request)
        if error is not None:
            self.fail(error)
        self._wake.set()

    def close(self) -> None:
        """The client is gone, or has what it wanted: let go of everything."""
        self.fail(ClientGone())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._take()

    def _take(self) -> Delta:
        first = self._unread.popleft()
        same = [first]
        while self._unread and (self._unread[0].index, self._unread[0].choice) == (
            first.index,
            first.choice,
        ):
            same.append(self._unread.popleft())
        delta = first if len(same) == 1 else join(same)
        self._num_unread -= len(delta.tokens)
        return delta

    def fail(self, error: Exception) -> None:
        """End the call: the reader gets what is there, then the error."""
        if self._error is None:
            self._error = error
        left, self._open = sorted(self._open), set()
        self._wake.set()
        if left:
            self._gone(left)


class Track:
    """One request on its way: turns what is delivered into deltas for its call."""

    def __init__(
        self,
        answers: Answers,
        index: int,
        text: AnswerText,
        stop_tokens: frozenset[int],
        cut: Callable[[int, int], None],
    ) -> None:
        self.answers = answers
        self._index = index
        self._text = text
        self._stop_tokens = stop_tokens  # the client's own
        self._cut = cut
        self._has_ended = False

    def deliver(self, what: Deliver) -> None:
        """New tokens; at a stop string the rest is left out and the choice is cut."""
        if self._has_ended:
            return
        stopped = what.finish is Finish.STOP
        new = self._text.feed(what.tokens, what.finish is not Finish.NONE, stopped)
        tokens, finish = what.tokens, FINISH_NAMES[what.finish]
        stop: str | int | None = new.stop
        if new.stop is not None:
            tokens, finish = tokens[: new.num_tokens], "stop"
        elif stopped and tokens[-1] in self._stop_tokens:
            stop = tokens[-1]
        self._has_ended = bool(finish)
        logprobs = what.logprobs[: len(tokens)]
        self.answers.push(
            Delta(
                self._index,
                what.choice,
                what.position,
                tokens,
                new.text,
                logprobs,  # type: ignore[arg-type]  # carried in the wire's form
                finish,
                stop,
            )
        )
        if new.stop is not None:
            self._cut(what.choice, what.position + new.num_tokens)
