"""The output side of a request: turns delivered tokens into deltas of its call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from penstock.common.text.detokenizer import IncrementalDetokenizer
from penstock.router.observability.request_metrics import DeliveredTokens
from penstock.router.requests.best_of import BestOfRanker
from penstock.router.requests.response_stream import Delta, ResponseStream
from penstock.router.requests.resume import FinishedChoice
from penstock.router.routing.events import DeliverEnd, DeliverPrompt, Finish

FINISH_REASONS: Mapping[int, str] = {Finish.NONE: "", Finish.STOP: "stop", Finish.LENGTH: "length"}


class ChoiceOutput(DeliveredTokens):
    """Detokenizer and state of one choice, with the times of its tokens.

    This is one object, because the delivery of a token may miss the CPU's caches once per object.
    """

    __slots__ = ("detokenizer", "is_finished", "is_plain")

    def __init__(self, detokenizer: IncrementalDetokenizer, is_plain: bool) -> None:
        super().__init__()
        self.detokenizer = detokenizer
        self.is_finished = False
        # Whether tokens can be delivered without checks.
        # True while the choice is open, if it has no stop strings and the choices are not ranked.
        self.is_plain = is_plain

    def end(self) -> None:
        self.is_finished, self.is_plain = True, False


class RequestOutput:
    """Output side of one request: converts delivered tokens into deltas of its call.

    Args:
        stream: the response stream of the call.
        index: index of the request in its call.
        detokenizers: one per choice.
        stop_tokens: the client's own stop token ids.
        on_stop_string: called with a choice and its number of tokens when a stop string matches.
        ranker: selects the most likely choices, or None to return all choices.
        finished_before: end of each choice in an earlier call, or None if it had not ended.

    Attributes:
        choices: the output side of each choice.
        ranker: the ranker of the choices, or None.
    """

    __slots__ = (
        "_finished_before",
        "_index",
        "_on_stop_string",
        "_stop_tokens",
        "choices",
        "ranker",
        "stream",
    )

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
        self._stop_tokens = stop_tokens
        self._on_stop_string = on_stop_string
        self.ranker = ranker
        self._finished_before = finished_before
        is_plain = ranker is None and not any(text.finds_stops for text in detokenizers)
        self.choices = [ChoiceOutput(text, is_plain) for text in detokenizers]

    def deliver_finished_before(self) -> None:
        """Deliver the end of each choice that had already ended in an earlier call."""
        for choice, end in enumerate(self._finished_before):
            if end is not None:
                self.choices[choice].end()
                ended = Delta(self._index, choice, end.num_tokens, (), "", (), end.finish, end.stop)
                self._push(ended)

    def deliver_prompt(self, what: DeliverPrompt) -> None:
        """Store data about the prompt. All of this data arrives before the first delta."""
        if what.num_cached is not None:
            self.stream.num_cached[self._index] = what.num_cached
            return
        known = self.stream.prompt_logprobs.setdefault(self._index, [])
        known.extend(what.logprobs)  # type: ignore[arg-type]  # carried in the wire's form

    def deliver(
        self, choice: int, position: int, token: int, finish: int, logprobs: object
    ) -> None:
        """Deliver a new token. A stop string ends the choice, and later tokens are dropped."""
        one = self.choices[choice]
        if finish or logprobs is not None or not one.is_plain:
            if not one.is_finished:
                self._deliver_general(choice, position, token, finish, logprobs)
            return
        text = one.detokenizer.feed_token(token)
        write = self.stream.idle_writer
        if write is None or not write(self._index, choice, position, token, text):
            self.stream.push(Delta(self._index, choice, position, (token,), text, (None,)))

    def _deliver_general(
        self, choice: int, position: int, token: int, finish: int, logprobs: object
    ) -> None:
        stopped, one = finish == Finish.STOP, self.choices[choice]
        new = one.detokenizer.feed((token,), finish != Finish.NONE, stopped)
        reason = FINISH_REASONS[finish]
        stop: str | int | None = None
        if new.stop is not None:
            reason, stop = "stop", new.stop
        elif stopped and token in self._stop_tokens:
            stop = token
        if reason:
            one.end()
        entry: Any = logprobs  # the worker's message is passed on unchanged
        self._push(Delta(self._index, choice, position, (token,), new.text, (entry,), reason, stop))
        if new.stop is not None:
            self._on_stop_string(choice, position + 1)

    def deliver_end(self, what: DeliverEnd) -> None:
        """Deliver the end of a choice that comes without a new token."""
        one = self.choices[what.choice]
        if one.is_finished:
            return
        one.end()
        text = one.detokenizer.feed((), ended=True).text
        finish = FINISH_REASONS[Finish.LENGTH]
        self._push(Delta(self._index, what.choice, what.num_tokens, (), text, (), finish))

    def _push(self, delta: Delta) -> None:
        if self.ranker is None:
            self.stream.push(delta)
            return
        for answer in self.ranker.add(delta):
            self.stream.push_final(answer)
