"""What flows back for one call: deltas of one or several answers, until all have ended."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from penstock.common.text.detokenizer import IncrementalDetokenizer
from penstock.protos import worker_pb2
from penstock.router.errors import Code, ServingError
from penstock.router.resume import PastEnd
from penstock.router.routing.events import Deliver, DeliverPrompt, Finish

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
        # Of each ask's prompt, from its second token on: complete before its first delta.
        self.prompts: dict[int, list[worker_pb2.TokenLogprobs]] = {}
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

    def push_whole(self, answer: Delta) -> None:
        """A whole answer, that no reader could have taken before: it counts as read."""
        self._unread.append(answer)
        self._num_unread += len(answer.tokens)
        self._max_unread += len(answer.tokens)
        self._wake.set()

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


class Ranking:
    """Holds the choices of a request back until all have ended; gives the likeliest.

    As in OpenAI's and TGI's `best_of` they are compared by the mean log probability of their
    tokens, so that a short answer is not the better for being short. Those of a beam search come
    ranked: it has as many as are wanted, the best first.
    """

    def __init__(self, num_told: int, num_wanted: int, with_logprobs: bool) -> None:
        self._deltas: list[list[Delta]] = [[] for _ in range(num_told)]
        self._num_open = num_told
        self._num_wanted = num_wanted
        self._with_logprobs = with_logprobs

    def add(self, delta: Delta) -> list[Delta]:
        """What can be given now: nothing, or with the last one the best, numbered from 0."""
        self._deltas[delta.choice].append(delta)
        self._num_open -= bool(delta.finish)
        if self._num_open:
            return []
        answers = list(map(join, self._deltas))
        if len(answers) > self._num_wanted:
            answers.sort(key=_mean_logprob, reverse=True)
        return [self._renumbered(n, one) for n, one in enumerate(answers[: self._num_wanted])]

    def _renumbered(self, number: int, answer: Delta) -> Delta:
        logprobs = answer.logprobs if self._with_logprobs else [None] * len(answer.tokens)
        return replace(answer, choice=number, logprobs=logprobs)


def _mean_logprob(answer: Delta) -> float:
    chosen = [entry.chosen for entry in answer.logprobs if entry is not None]
    return sum(chosen) / max(len(chosen), 1)


class Track:
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
        answers: Answers,
        index: int,
        texts: Sequence[IncrementalDetokenizer],
        stop_tokens: frozenset[int],
        cut: Callable[[int, int], None],
        ranking: Ranking | None = None,
        past: Sequence[PastEnd | None] = (),
    ) -> None:
        self.answers = answers
        self._index = index
        self._texts = texts
        self._stop_tokens = stop_tokens
        self._cut = cut
        self._ranking = ranking
        self._past = past
        self._ended = [False] * len(texts)

    def deliver_past(self) -> None:
        """Say of every choice that had ended before how it has: nothing more comes of it."""
        for choice, end in enumerate(self._past):
            if end is not None:
                self._ended[choice] = True
                ended = Delta(self._index, choice, end.num_tokens, (), "", (), end.finish, end.stop)
                self._push(ended)

    def deliver_prompt(self, what: DeliverPrompt) -> None:
        """Logprobs of the next prompt tokens: they wait for the first delta."""
        known = self.answers.prompts.setdefault(self._index, [])
        known.extend(what.logprobs)  # type: ignore[arg-type]  # carried in the wire's form

    def deliver(self, what: Deliver) -> None:
        """New tokens; at a stop string the rest is left out and the choice is cut."""
        if self._ended[what.choice]:
            return
        stopped = what.finish is Finish.STOP
        text = self._texts[what.choice]
        new = text.feed(what.tokens, what.finish is not Finish.NONE, stopped)
        tokens, finish = what.tokens, FINISH_NAMES[what.finish]
        stop: str | int | None = new.stop
        if new.stop is not None:
            tokens, finish = tokens[: new.num_tokens], "stop"
        elif stopped and tokens[-1] in self._stop_tokens:
            stop = tokens[-1]
        self._ended[what.choice] = bool(finish)
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
            self._cut(what.choice, what.position + new.num_tokens)

    def _push(self, delta: Delta) -> None:
        if self._ranking is None:
            self.answers.push(delta)
            return
        for answer in self._ranking.add(delta):
            self.answers.push_whole(answer)
