"""Answers of chats with tool calls and reasoning, in OpenAI's format.

Reasoning is in `reasoning_content`, as in vLLM and in DeepSeek's API.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from json.encoder import encode_basestring
from typing import Any

from penstock.router.api.generation.answer_pieces import AnswerPieces
from penstock.router.api.openai.json_fragments import dumps
from penstock.router.api.openai.response import ChatFormatter
from penstock.router.api.openai.response_context import ResponseContext
from penstock.router.api.openai.token_chunks import PLAIN
from penstock.router.parsers.pieces import (
    ARGUMENTS,
    CALL,
    CONTENT,
    REASONING,
    Piece,
)
from penstock.router.requests.answer_parsing import AnswerParsing
from penstock.router.requests.json_text import fragments_of, string
from penstock.router.requests.response_stream import Delta

CHARS_PER_FRAGMENT = 4096  # characters per call of the parser; a call takes about 2 ms

FIELDS = {CONTENT: "content", REASONING: "reasoning_content"}


class ParsedChatFormatter(ChatFormatter):
    """A formatter of `chat.completion` objects whose texts are parsed.

    Args:
        context: data of the call.
        parsing: makes the parser of each answer.
    """

    def __init__(self, context: ResponseContext, parsing: AnswerParsing) -> None:
        super().__init__(context)
        self._parsing = parsing
        self._answers: dict[int, AnswerPieces] = {}  # answers of a stream, by index of the choice
        # JSON before and after a piece's text; the key is (choice, kind of the piece, call).
        self._sides: dict[tuple[int, str, int], tuple[str, str]] = {}
        self.token_chunk = self._token_chunk

    # ------------------------------------------------------------ complete responses

    def _answer(self, delta: Delta) -> Iterator[str]:
        index = self._context.choice_index(delta)
        answer = self._new_answer()
        pieces: list[Piece] = []
        for start in range(0, len(delta.text), CHARS_PER_FRAGMENT):
            pieces += answer.feed(delta.text[start : start + CHARS_PER_FRAGMENT])
            yield ""
        pieces += answer.feed("", has_ended=True)
        echoed = self._context.echoed(delta)
        content, others = self._message(index, pieces, any(echoed))
        yield f'{{"index":{index},"message":{{"role":"assistant","content":'
        yield from ("null",) if content is None else string(*echoed, content)
        yield "," + dumps(others)[1:]
        yield from self._choice_fields(replace(delta, finish=answer.finish_reason(delta.finish)))

    def _message(
        self, index: int, pieces: Sequence[Piece], has_echo: bool
    ) -> tuple[str | None, dict[str, Any]]:
        """Return the content of a message without the echoed text, and the fields after it."""
        texts = {
            kind: "".join(piece.text for piece in pieces if piece.kind == kind) for kind in FIELDS
        }
        calls = [piece for piece in pieces if piece.kind == CALL]
        arguments = [""] * len(calls)
        for piece in pieces:
            if piece.kind == ARGUMENTS:
                arguments[piece.call] += piece.text
        content, reasoning = texts[CONTENT], texts[REASONING]
        others: dict[str, Any] = {"refusal": None}
        if reasoning:
            others["reasoning_content"] = reasoning
        if calls:
            others["tool_calls"] = [
                {
                    "id": self._call_id(index, piece),
                    "type": "function",
                    "function": {"name": piece.text, "arguments": arguments[piece.call]},
                }
                for piece in calls
            ]
        is_empty = not (content or has_echo)
        return None if is_empty and (calls or reasoning) else content, others

    # ------------------------------------------------------------ chunks

    def chunk(self, delta: Delta) -> Iterator[str]:
        """Yield the server-sent events for some new tokens.

        Each piece of their text is one event.
        """
        index = self._context.choice_index(delta)
        pieces: list[Piece] = []
        if index not in self._answers:
            self._answers[index] = self._new_answer()
            yield from self._first_chunk(index)
            for text in self._context.echoed(delta):
                pieces += [Piece(CONTENT, part) for part in fragments_of(text)]
        answer = self._answers[index]
        self._progress.add(index, delta)
        pieces += answer.feed(delta.text, has_ended=bool(delta.finish))
        delta = replace(delta, finish=answer.finish_reason(delta.finish))
        for piece in pieces[:-1]:
            yield self._piece_event(index, piece)
        if pieces and not delta.finish and self._context.wants_only_text:
            yield self._piece_event(index, pieces[-1])
        elif pieces or delta.finish or not self._context.wants_only_text:
            new = self._delta(index, pieces[-1]) if pieces else {}
            yield f'{self._head},"choices":[{dumps({"index": index, "delta": new})[:-1]}'
            yield from self._choice_fields(delta)
            yield "}]" + self._end()

    def _token_chunk(self, index: int, choice: int, text: str) -> bytes | None:
        """Return the events for a token (`ResponseFormatter.token_chunk`)."""
        index = index * self._context.num_choices + choice
        answer = self._answers.get(index)
        if answer is None or not self._context.wants_only_text:
            return None
        self._progress.num_tokens += 1
        pieces = answer.feed(text)
        return "".join(self._piece_event(index, piece) for piece in pieces).encode()

    def _piece_event(self, index: int, piece: Piece) -> str:
        """Return the event for a piece that does not end the choice."""
        if piece.kind == CALL:
            return self._event(self._choice(index, piece))
        # Build the JSON around the text once per choice, kind and call, because it is constant.
        key = (index, piece.kind, piece.call)
        sides = self._sides.get(key)
        if sides is None or self._context.wants_continuous_usage:
            mark = self.token_chunks.TEXT
            event = self._event(self._choice(index, piece._replace(text=mark)))
            before, _, after = event.partition(dumps(mark))
            sides = self._sides[key] = before, after
        return f"{sides[0]}{encode_basestring(piece.text)}{sides[1]}"

    def _choice(self, index: int, piece: Piece) -> str:
        return dumps({"index": index, "delta": self._delta(index, piece), **PLAIN})

    def _delta(self, index: int, piece: Piece) -> dict[str, Any]:
        call = piece.call
        if piece.kind == CALL:
            function = {"name": piece.text, "arguments": ""}
            begun = {"index": call, "id": self._call_id(index, piece), "type": "function"}
            return {"tool_calls": [{**begun, "function": function}]}
        if piece.kind == ARGUMENTS:
            return {"tool_calls": [{"index": call, "function": {"arguments": piece.text}}]}
        return {FIELDS[piece.kind]: piece.text}

    def _call_id(self, index: int, piece: Piece) -> str:
        """Return the id of a tool call: the one that the model wrote, or else a generated one."""
        return piece.call_id or self._parsing.call_id(index, piece.call)

    def _new_answer(self) -> AnswerPieces:
        return AnswerPieces(self._parsing.new_parser())
