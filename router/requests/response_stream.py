"""The response stream of a call: deltas of one or more answers until all have ended."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from penstock.common.text.detokenizer import IncrementalDetokenizer
from penstock.protos import worker_pb2
from penstock.router.errors import Code, ServingError
from penstock.router.requests.resume import FinishedChoice
from penstock.router.routing.events import Deliver, DeliverPrompt, Finish

FINISH_REASONS = {Finish.NONE: "", Finish.STOP: "stop", Finish.LENGTH: "length"}


class ClientDisconnectedError(Exception):
    """The client has disconnected, or no longer needs the answer."""


# Not frozen: a Delta is created per token, and a frozen dataclass takes 3 times as long to create.
@dataclass(slots=True)
class Delta:
    """New tokens of one choice and the text that they add."""

    index: int  # index of the request in its call
    choice: int
    position: int  # token index of the first new token
    tokens: Sequence[int]
    text: str
    logprobs: Sequence[worker_pb2.TokenLogprobs | None]
    finish: str = ""  # "stop" or "length" in the last delta
    stop: str | int | None = None  # the client's stop string or stop token that ended the choice


def merge(deltas: Sequence[Delta]) -> Delta:
    """Merge consecutive deltas of one choice into one."""
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


class ResponseStream:
    """The answers of one call, as an asynchronous iterator of deltas.

    Consecutive unread deltas of a choice are merged. If too many tokens are unread, the call fails,
    so that a slow reader never blocks the router.

    Args:
        max_unread: largest number of unread tokens.
        on_cancel: called with the requests to cancel when the call ends early.
    """

    def __init__(self, max_unread: int, on_cancel: Callable[[Sequence[int]], None]) -> None:
        self.seeds: list[int] = []  # seed of each request of the call
        # Prompt logprobs by request index, from token 1 on. Complete before the first delta.
        self.prompt_logprobs: dict[int, list[worker_pb2.TokenLogprobs]] = {}
        self._max_unread = max_unread
        self._on_cancel = on_cancel
        self._open_requests: set[int] = set()  # requests that have not ended
        self._unread: deque[Delta] = deque()
        self._num_unread = 0
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def add_request(self, request: int, seed: int) -> None:
        """Add a request of the call; requests must be added in order of their index."""
        self._open_requests.add(request)
        self.seeds.append(seed)

    def push_final(self, answer: Delta) -> None:
        """Append a complete answer, without counting it against the unread limit."""
        self._unread.append(answer)
        self._num_unread += len(answer.tokens)
        self._max_unread += len(answer.tokens)
        self._wake.set()

    def push(self, delta: Delta) -> None:
        """Append new tokens without waiting; fail the call if too many are unread."""
        self._unread.append(delta)
        self._num_unread += len(delta.tokens)
        self._wake.set()
        if self._num_unread > self._max_unread:
            self.fail(
                ServingError(
                    Code.OVERLOADED,
                    f"the answer was read too slowly: over {self._max_unread} tokens are unread",
                )
            )

    def request_ended(self, request: int, error: ServingError | None) -> None:
        """Record the end of a request; an error ends the whole call."""
        self._open_requests.discard(request)
        if error is not None:
            self.fail(error)
        self._wake.set()

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
            await self._wake.wait()
        return self._next_delta()

    def _next_delta(self) -> Delta:
        first = self._unread.popleft()
        same = [first]
        while self._unread and (self._unread[0].index, self._unread[0].choice) == (
            first.index,
            first.choice,
        ):
            same.append(self._unread.popleft())
        delta = first if len(same) == 1 else merge(same)
        self._num_unread -= len(delta.tokens)
        return delta

    def fail(self, error: Exception) -> None:
        """Cancel the open requests and end the call with an error; unread deltas come first."""
        if self._error is None:
            self._error = error
        left, self._open_requests = sorted(self._open_requests), set()
        self._wake.set()
        if left:
            self._on_cancel(left)


class BestOfRanker:
    """A buffer of a request's choices that returns the likeliest ones once all have ended.

    Choices are ranked by the mean log probability of their tokens, as in `best_of` of OpenAI and
    TGI, so that short answers have no advantage. A beam search already returns exactly the
    requested number of choices, best first; its choices are not ranked again.
    """

    def __init__(self, num_choices: int, num_returned: int, with_logprobs: bool) -> None:
        self._deltas: list[list[Delta]] = [[] for _ in range(num_choices)]
        self._num_open = num_choices
        self._num_returned = num_returned
        self._with_logprobs = with_logprobs

    def add(self, delta: Delta) -> list[Delta]:
        """Add a delta; when all choices have ended, return the best ones, renumbered from 0."""
        self._deltas[delta.choice].append(delta)
        self._num_open -= bool(delta.finish)
        if self._num_open:
            return []
        answers = list(map(merge, self._deltas))
        if len(answers) > self._num_returned:
            answers.sort(key=_mean_logprob, reverse=True)
        return [self._renumbered(n, one) for n, one in enumerate(answers[: self._num_returned])]

    def _renumbered(self, choice: int, answer: Delta) -> Delta:
        logprobs = answer.logprobs if self._with_logprobs else [None] * len(answer.tokens)
        return replace(answer, choice=choice, logprobs=logprobs)


def _mean_logprob(answer: Delta) -> float:
    chosen = [entry.chosen for entry in answer.logprobs if entry is not None]
    return sum(chosen) / max(len(chosen), 1)


class RequestOutput:
    """Output side of one request: converts delivered tokens into deltas of its call.

    Args:
        stream: the response stream of the call.
        index: index of the request in its call.
        detokenizers: one per choice.
        stop_tokens: stop token ids that the client gave.
        on_stop_string: called with a choice and its number of tokens when a stop string matches.
        ranker: selects the likeliest choices; None: all choices are returned.
        finished_before: end of each choice in an earlier call; None: not ended.
    """

    def __init__(
        self,
        stream: ResponseStream,
        index: int,
        detokenizers: Sequence[IncrementalDetokenizer],
        stop_tokens: frozenset[int],
        on_stop_string: Callable[[int, int], None],
        ranker: BestOfRanker | None = None,
        finished_before: Sequence[FinishedChoice | None] = (),
    ) -> None:
        self.stream = stream
        self._index = index
        self._detokenizers = detokenizers
        self._stop_tokens = stop_tokens
        self._on_stop_string = on_stop_string
        self._ranker = ranker
        self._finished_before = finished_before
        self._is_finished = [False] * len(detokenizers)

    def deliver_finished_before(self) -> None:
        """Deliver the end of each choice that ended in an earlier call."""
        for choice, end in enumerate(self._finished_before):
            if end is not None:
                self._is_finished[choice] = True
                ended = Delta(self._index, choice, end.num_tokens, (), "", (), end.finish, end.stop)
                self._push(ended)

    def deliver_prompt(self, what: DeliverPrompt) -> None:
        """Store logprobs of the next prompt tokens; all of them arrive before the first delta."""
        known = self.stream.prompt_logprobs.setdefault(self._index, [])
        known.extend(what.logprobs)  # type: ignore[arg-type]  # carried in the wire's form

    def deliver(self, what: Deliver) -> None:
        """Deliver new tokens; a stop string ends the choice, and later tokens are dropped."""
        if self._is_finished[what.choice]:
            return
        stopped = what.finish is Finish.STOP
        text = self._detokenizers[what.choice]
        new = text.feed(what.tokens, what.finish is not Finish.NONE, stopped)
        tokens, finish = what.tokens, FINISH_REASONS[what.finish]
        stop: str | int | None = new.stop
        if new.stop is not None:
            tokens, finish = tokens[: new.num_tokens], "stop"
        elif stopped and tokens[-1] in self._stop_tokens:
            stop = tokens[-1]
        self._is_finished[what.choice] = bool(finish)
        logprobs = what.logprobs[: len(tokens)]
        self._push(
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
            self._on_stop_string(what.choice, what.position + new.num_tokens)

    def _push(self, delta: Delta) -> None:
        if self._ranker is None:
            self.stream.push(delta)
            return
        for answer in self._ranker.add(delta):
            self.stream.push_final(answer)
