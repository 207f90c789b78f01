"""Answers as messages of Anthropic's API: one JSON object, or a stream of events."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.router.api.anthropic.errors import error_body
from penstock.router.api.anthropic.events import PING, BlockEvents, blocks_of, event
from penstock.router.api.generation.answer_pieces import TOOL_CALLS, AnswerPieces
from penstock.router.errors import ServingError
from penstock.router.parsers.pieces import Piece
from penstock.router.requests.answer_parsing import AnswerParsing
from penstock.router.requests.json_text import dumps
from penstock.router.requests.response_stream import Delta

CHARS_PER_FRAGMENT = 4096  # characters per call of the parser; a call takes about 2 ms

STOP_REASONS: Mapping[str, str] = {"stop": "end_turn", TOOL_CALLS: "tool_use"}
"""Stop reason for each finish reason except `length`, for which `_stop` selects one of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageContext:
    """Data of a call from which its response, a `message` object, is made.

    Attributes:
        id: id of the message.
        request_id: id of the request.
        model: name of the model.
        num_prompt: number of prompt tokens.
        num_cached: number of cached prompt tokens (see `ResponseStream.num_cached`).
        fills_context: whether the model's context has room for fewer than `max_tokens` answer
            tokens, so that the longest answer ends at the end of the context.
        only_prompt: whether to hide the generated token, because the client wants no answer.
        omits_thinking: whether thinking blocks are sent without their text.
    """

    id: str
    request_id: str
    model: str
    num_prompt: int
    num_cached: Mapping[int, int]
    fills_context: bool
    only_prompt: bool
    omits_thinking: bool

    def usage(self, num_output: int) -> Mapping[str, Any]:
        """Return the token counts; tokens from the prefix cache do not count as input tokens."""
        num_cached = self.num_cached.get(0, 0)
        return {
            "input_tokens": self.num_prompt - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": num_output,
            "service_tier": "standard",
        }


class MessageFormatter:
    """A formatter of messages (a `ResponseFormatter`).

    Args:
        context: data of the call.
        parsing: makes the parser of the answer, or None if all of its text is content.
    """

    def __init__(self, context: MessageContext, parsing: AnswerParsing | None) -> None:
        self._context = context
        self._parsing = parsing
        parser = None if parsing is None else parsing.new_parser()
        self._is_plain = parser is None
        self._answer = AnswerPieces(parser)
        self._blocks = BlockEvents(self._call_id, context.omits_thinking)
        self._num_tokens = 0
        self._has_begun = False
        self._end: Mapping[str, Any] = _no_end()
        self.token_chunk = self._token_chunk

    def full_response(self, deltas: Sequence[Delta]) -> Iterator[str]:
        """Yield the complete message in fragments."""
        (delta,) = map(self._shown, deltas)
        pieces: list[Piece] = []
        for start in range(0, len(delta.text), CHARS_PER_FRAGMENT):
            pieces += self._answer.feed(delta.text[start : start + CHARS_PER_FRAGMENT])
            yield ""
        pieces += self._answer.feed("", has_ended=True)
        content = blocks_of(pieces, self._call_id, self._context.omits_thinking)
        yield dumps(self._message(content, self._stop(delta), len(delta.tokens)))

    def chunk(self, delta: Delta) -> Iterator[str]:
        """Yield the events for some new tokens."""
        if not self._has_begun:
            yield self._begin()
        delta = self._shown(delta)
        self._num_tokens += len(delta.tokens)
        for piece in self._answer.feed(delta.text, has_ended=bool(delta.finish)):
            yield self._blocks.add(piece)
        if delta.finish:
            self._end = self._stop(delta)

    def keep_alive(self) -> str:
        """Return the events to send if no event was sent for a long time."""
        return PING if self._has_begun else self._begin() + PING

    def _begin(self) -> str:
        self._has_begun = True
        return event("message_start", message=self._message([], _no_end(), 0))

    def end_of_stream(self) -> str:
        """Return the events that end the message."""
        usage = self._context.usage(self._num_tokens)
        ended = event("message_delta", delta=self._end, usage=usage)
        return self._blocks.end() + ended + event("message_stop")

    def error_events(self, error: ServingError) -> Iterator[str]:
        """Yield the event of an error, after which the stream ends."""
        body = error_body(error, self._context.request_id)
        yield f"event: error\ndata: {dumps(body)}\n\n"

    def _token_chunk(self, index: int, choice: int, text: str) -> bytes | None:
        """Return the events for a token (`ResponseFormatter.token_chunk`)."""
        if not self._has_begun:
            return None
        self._num_tokens += 1
        if self._is_plain and text:
            return self._blocks.add_text(text).encode()
        add = self._blocks.add
        return "".join([add(piece) for piece in self._answer.feed(text)]).encode()

    def _shown(self, delta: Delta) -> Delta:
        """Return the delta, without the generated token if the call only computes a prompt."""
        if not self._context.only_prompt:
            return delta
        return replace(delta, tokens=(), text="", finish="length", stop=None)

    def _message(
        self, content: Sequence[Any], end: Mapping[str, Any], num_output: int
    ) -> Mapping[str, Any]:
        return {
            "id": self._context.id,
            "type": "message",
            "role": "assistant",
            "model": self._context.model,
            "content": content,
            **end,
            "usage": self._context.usage(num_output),
        }

    def _stop(self, delta: Delta) -> Mapping[str, Any]:
        """Return the fields of the message that show why the answer has ended."""
        if isinstance(delta.stop, str):
            return _no_end() | {"stop_reason": "stop_sequence", "stop_sequence": delta.stop}
        finish = self._answer.finish_reason(delta.finish)
        if finish == "length":
            full = self._context.fills_context
            return _no_end() | {
                "stop_reason": "model_context_window_exceeded" if full else "max_tokens"
            }
        return _no_end() | {"stop_reason": STOP_REASONS.get(finish, "end_turn")}

    def _call_id(self, piece: Piece) -> str:
        """Return the id of a tool call: the one that the model wrote, or else a generated one."""
        assert self._parsing is not None, "only a parser finds calls"
        return piece.call_id or self._parsing.call_id(0, piece.call)


def _no_end() -> dict[str, Any]:
    return {"stop_reason": None, "stop_sequence": None, "stop_details": None}
