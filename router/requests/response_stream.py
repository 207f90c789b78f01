"""What flows back for one call: deltas of one or several answers, until all have ended."""

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


def merge(deltas: Sequence[Delta]) -> Delta:
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


class ResponseStream:
    """The answers of one call, as an asynchronous iterator of deltas.

    What a slow reader has not taken yet is joined, and bounded: beyond the bound the call ends with
    an error, and nothing else waits for it.

    Args:
        max_unread: tokens that may wait unread.
        gone: called with the requests that are not wanted any more.
    """

    def __init__(self, max_unread: int, on_cancel: Callable[[Sequence[int]], None]) -> None:
        self.seeds: list[int] = []  # of each ask
        # Of each ask's prompt, from its second token on: complete before its first delta.
        self.prompt_logprobs: dict[int, list[worker_pb2.TokenLogprobs]] = {}
        self._max_unread = max_unread
        self._on_cancel = on_cancel
        self._open_requests: set[int] = set()  # requests that have not ended
        self._unread: deque[Delta] = deque()
        self._num_unread = 0
        self._error: Exception | None = None
        self._wake = asyncio.Event()

    def add_request(self, request: int, seed: int) -> None:
        """One request of the call, in the order of its asks."""
        self._open_requests.add(request)
        self.seeds.append(seed)

    def push_final(self, answer: Delta) -> None:
        """A whole answer, that no reader could have taken before: it counts as read."""
        self._unread.append(answer)
        self._num_unread += len(answer.tokens)
        self._max_unread += len(answer.tokens)
        self._wake.set()

    def push(self, delta: Delta) -> None:
        """Append new tokens for the reader; does not wait."""
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

    def request_ended(self, request: int, error: ServingError | None) -> None:
        """One request is over; with an error, so is the call."""
        self._open_requests.discard(request)
        if error is not None:
            self.fail(error)
        self._wake.set()

    def close(self) -> None:
        """The client is gone, or has what it wanted: let go of everything."""
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
        """End the call: the reader gets what is there, then the error."""
        if self._error is None:
            self._error = error
        left, self._open_requests = sorted(self._open_requests), set()
        self._wake.set()
        if left:
            self._on_cancel(left)


class BestOfRanker:
    """Holds the choices of a request back until all have ended; gives the likeliest.

    As in OpenAI's and TGI's `best_of` they are compared by the mean log probability of their
    tokens, so that a short answer is not the better for being short. Those of a beam search come
    ranked: it has as many as are wanted, the best first.
    """

    def __init__(self, num_choices: int, num_returned: int, with_logprobs: bool) -> None:
        self._deltas: list[list[Delta]] = [[] for _ in range(num_choices)]
        self._num_open = num_choices
        self._num_returned = num_returned
        self._with_logprobs = with_logprobs

    def add(self, delta: Delta) -> list[Delta]:
        """What can be given now: nothing, or with the last one the best, numbered from 0."""
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
    """One request on its way: turns what is delivered into deltas for its call.

    Args:
        texts: of its choices.
        stop_tokens: the client's own.
        cut: called with a choice, and the length after which a stop string has ended it.
        ranking: where only the likeliest choices are given.
        past: how choices have ended in an earlier call; by default none has.
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
        """Say of every choice that had ended before how it has: nothing more comes of it."""
        for choice, end in enumerate(self._finished_before):
            if end is not None:
                self._is_finished[choice] = True
                ended = Delta(self._index, choice, end.num_tokens, (), "", (), end.finish, end.stop)
                self._push(ended)

    def deliver_prompt(self, what: DeliverPrompt) -> None:
        """Logprobs of the next prompt tokens: they wait for the first delta."""
        known = self.stream.prompt_logprobs.setdefault(self._index, [])
        known.extend(what.logprobs)  # type: ignore[arg-type]  # carried in the wire's form

    def deliver(self, what: Deliver) -> None:
        """New tokens; at a stop string the rest is left out and the choice is cut."""
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
