"""Answers in the format of the Responses API: one object, or typed server-sent events."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.common.text.token_bytes import TokenBytes
from penstock.router.api.generation.answer_pieces import AnswerPieces
from penstock.router.api.generation.calls import SubmittedCall
from penstock.router.api.openai.json_fragments import dumps
from penstock.router.api.openai.response_context import Logprobs
from penstock.router.api.openai.token_logprobs import logprobs_json
from penstock.router.api.responses.events import EventStream
from penstock.router.api.responses.output import Output, OutputItem
from penstock.router.api.responses.response_object import Outcome, ResponseObject
from penstock.router.api.responses.token_kinds import TokenKinds, TokenTexts
from penstock.router.errors import ServingError
from penstock.router.parsers.pieces import CALL, CONTENT, Piece
from penstock.router.requests.response_stream import Delta

CHARS_PER_FRAGMENT = 4096  # characters per call of the parser; a call takes about 2 ms

NO_PIECES: tuple[Sequence[Piece], Sequence[str]] = ((), ())

EMPTY_MESSAGE = Piece(CONTENT, "")
"""The only piece of an answer that has no text."""


@dataclass(frozen=True, slots=True)
class FinishedResponse:
    """A response that has ended.

    Attributes:
        body: the response as JSON, in fragments.
        output: its items.
        status: `completed`, `incomplete`, `failed` or `cancelled`.
    """

    body: Sequence[str]
    output: Output
    status: str


class Recorder(Protocol):
    """Interface of the object that stores responses when they have ended."""

    def keeps(self, num_bytes: int) -> bool:
        """Return whether a response whose output has `num_bytes` as JSON will be stored.

        Raises:
            ServingError: TOO_LARGE if the response would be lost.
        """
        ...

    def record(self, finished: FinishedResponse) -> Iterator[str]:
        """Store the response if it is to be stored; yield an empty text after each short step."""
        ...


class ResponsesFormatter:
    """A `ResponseFormatter` of a call with one answer.

    Args:
        response: the constant members of the response.
        call: the call.
        token_bytes: the bytes of the model's tokens.
        with_logprobs: whether the response has log probabilities.
        recorder: stores the response when it has ended.
    """

    def __init__(
        self,
        response: ResponseObject,
        call: SubmittedCall,
        token_bytes: TokenBytes,
        with_logprobs: bool,
        recorder: Recorder,
    ) -> None:
        self._response = response
        self._call = call
        self._token_bytes = token_bytes
        self._with_logprobs = with_logprobs
        self._recorder = recorder
        parser = None if call.parsing is None else call.parsing.new_parser()
        self._answer = AnswerPieces(parser)
        self._is_plain = parser is None and not with_logprobs
        self._texts = TokenTexts(token_bytes, call.shown_tokens)
        self._kinds = TokenKinds()
        self._suffix = response.id.partition("_")[2]
        self._output = Output(self._suffix)
        self._events = EventStream()
        self._num_tokens = 0
        self._has_ended = False
        # Kinds of the events that must be made before the first events for tokens.
        self._opening: Sequence[str] = ("created", "in_progress")

    # ------------------------------------------------------------ complete responses

    def full_response(self, deltas: Sequence[Delta]) -> Iterator[str]:
        (delta,) = deltas
        for pieces, entries in self._pieces(delta):
            for piece in pieces:
                if not self._output.continues(piece):
                    self._begin(piece)
                self._output.last.add(piece, entries)
            yield ""
        if not self._output.items:
            self._begin(EMPTY_MESSAGE)
        yield from self._finished(self._outcome(delta))

    def _outcome(self, delta: Delta) -> Outcome:
        if delta.finish == "length":
            return Outcome("incomplete", self._usage())
        return Outcome("completed", self._usage(), int(time.time()))

    def ended_early(self, outcome: Outcome) -> Iterator[str]:
        """Yield the JSON of a response that failed or was canceled, without output."""
        self._output = Output(self._suffix)
        return self._finished(outcome)

    def _finished(self, outcome: Outcome) -> Iterator[str]:
        """Yield the response, then pass it to the recorder."""
        body: list[str] = []
        status = outcome.status if outcome.status == "completed" else "incomplete"
        output = self._output.json(status)
        for fragment in self._response.json(outcome, output, self._recorder.keeps):
            body.append(fragment)
            yield fragment
        self._has_ended = True
        yield from self._recorder.record(FinishedResponse(body, self._output, outcome.status))

    def _usage(self) -> Mapping[str, Any]:
        num_input = len(self._call.prompts[0])
        cached = self._call.answers.num_cached.get(0, 0)
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": self._num_tokens,
            "output_tokens_details": {"reasoning_tokens": self._kinds.num_reasoning},
            "total_tokens": num_input + self._num_tokens,
        }

    # ------------------------------------------------------------ pieces

    def _pieces(self, delta: Delta) -> Iterator[tuple[Sequence[Piece], Sequence[str]]]:
        """Yield the new pieces of a delta, with the log probabilities of the content in them."""
        self._num_tokens += len(delta.tokens)
        if self._is_plain:
            for start in range(0, len(delta.text), CHARS_PER_FRAGMENT):
                yield self._answer.feed(delta.text[start : start + CHARS_PER_FRAGMENT]), ()
        else:
            yield from self._token_pieces(delta)
        if delta.finish:
            # The last delta may have no tokens, but text that the parser of stop strings held back.
            rest = "" if delta.tokens or self._is_plain else delta.text
            pieces = self._answer.feed(rest, has_ended=True)
            entries: list[str] = []
            yield from self._encode_content(pieces, (), entries)
            self._kinds.add(pieces, num_tokens=0)
            self._kinds.finish()
            yield pieces, entries

    def _token_pieces(self, delta: Delta) -> Iterator[tuple[Sequence[Piece], Sequence[str]]]:
        texts = self._texts.split(delta)
        last = (
            len(delta.tokens) - 1 if delta.finish == "stop" else -1
        )  # the index of the end token, whose log probability is left out because it has no text
        rows = zip(delta.tokens, texts, delta.logprobs, strict=True)
        for index, (token, text, entry) in enumerate(rows):
            pieces = self._answer.feed(text)
            entries: list[str] = []
            own = () if index == last else ((token, entry),)
            yield from self._encode_content(pieces, own, entries)
            self._kinds.add(pieces)
            yield pieces, entries

    def _encode_content(
        self,
        pieces: Sequence[Piece],
        entries: Sequence[tuple[int, Logprobs | None]],
        into: list[str],
    ) -> Iterator[tuple[Sequence[Piece], Sequence[str]]]:
        """Append the log probabilities of the content in `pieces` to `into` as JSON, if requested.

        Yields an empty result after each token, so that the caller can pause. There may be many
        tokens if their text was held back.
        """
        if not self._with_logprobs:
            return
        for one in self._kinds.content_entries(pieces, entries):
            into.append(logprobs_json(self._token_bytes, *one))
            yield NO_PIECES

    def _begin(self, piece: Piece) -> OutputItem:
        """Begin the output item of a piece."""
        call_id, parsing = piece.call_id, self._call.parsing
        if piece.kind == CALL and not call_id and parsing is not None:
            call_id = parsing.call_id(0, piece.call)
        return self._output.begin(piece, call_id)

    # ------------------------------------------------------------ events

    def chunk(self, delta: Delta) -> Iterator[str]:
        """Yield the events for some new tokens; after the last token, also the final events."""
        for kind in self._opening:
            yield from self._events.response(kind, self._response.json(Outcome("in_progress")))
        self._opening = ()
        for pieces, entries in self._pieces(delta):
            yield ""
            for piece in pieces:
                yield from self._piece_events(piece, entries)
        if delta.finish:
            if not self._output.items:
                yield from self._events.begin_item(self._begin(EMPTY_MESSAGE))
            outcome = self._outcome(delta)
            yield from self._events.end_item(self._output.last, outcome.status)
            yield from self._events.response(outcome.status, self._finished(outcome))

    def queued_events(self) -> Iterator[str]:
        """Yield the events of a queued response; must be called before `chunk`."""
        for kind in ("created", "queued"):
            yield from self._events.response(kind, self._response.json(Outcome("queued")))
        self._opening = ("in_progress",)

    def token_chunk(self, index: int, choice: int, text: str) -> bytes | None:
        """Return the events for a token that only adds text; None if `chunk` must send it."""
        if not self._events.num_events or self._with_logprobs:
            return None
        self._num_tokens += 1
        # Without a parser, the message is the only output item.
        if self._is_plain and self._output.items:
            if not text:
                return b""
            self._output.last.write(text)
            return self._events.text(text).encode()
        pieces = self._answer.feed(text)
        self._kinds.add(pieces)
        fragments = [each for piece in pieces for each in self._piece_events(piece)]
        return "".join(fragments).encode()

    def _piece_events(self, piece: Piece, logprobs: Sequence[str] = ()) -> Iterator[str]:
        output = self._output
        if not output.continues(piece):
            if output.items:
                yield from self._events.end_item(output.last, "completed")
            yield from self._events.begin_item(self._begin(piece))
        output.last.add(piece, logprobs)
        if piece.kind != CALL:
            entries = logprobs if piece.kind == CONTENT else ()
            yield self._events.text(piece.text, entries)

    def end_of_stream(self) -> str:
        """Return an empty text, because `chunk` has already returned the last event."""
        return ""

    def failed_events(self, error: ServingError) -> Iterator[str]:
        """Yield the events of an error, whatever events were made before.

        The response then has no output.
        """
        self._output = Output(self._suffix)
        self._has_ended = False
        return self.error_events(error)

    def error_events(self, error: ServingError) -> Iterator[str]:
        if self._has_ended:
            return
        members = {"code": error.reason or error.code.value, "message": error.message}
        shown = dumps({**members, "param": error.param})[1:-1]
        failed = self._finished(Outcome("failed", self._usage(), error=error))
        yield from self._events.event("error", (shown,))
        yield from self._events.response("failed", failed)
