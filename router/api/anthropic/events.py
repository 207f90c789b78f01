"""The server-sent events of a message, and its content blocks."""

import json
from collections.abc import Callable, Iterable, Mapping
from json.encoder import encode_basestring
from typing import Any

from pydantic_core import from_json

from penstock.router.parsers.pieces import ARGUMENTS, CALL, CONTENT, REASONING, Piece
from penstock.router.requests.json_text import dumps

SIGNATURE = "unsigned"
"""Signature of all thinking blocks; clients require a signature and send it back."""

DELTAS: Mapping[str, tuple[str, str]] = {
    CONTENT: ("text_delta", "text"),
    REASONING: ("thinking_delta", "thinking"),
    ARGUMENTS: ("input_json_delta", "partial_json"),
}
"""For each kind of piece: the type of a delta, and the field of the delta that has the text."""


def event(kind: str, **fields: Any) -> str:
    """Return a server-sent event whose data is a JSON object with the type `kind` and `fields`."""
    return f"event: {kind}\ndata: {dumps({'type': kind, **fields})}\n\n"


PING = event("ping")


class BlockEvents:
    """Converts the pieces of an answer to the events of its content blocks.

    Args:
        call_id: returns the id of a call.
        omits_thinking: whether blocks of thinking have no text.
    """

    def __init__(self, call_id: Callable[[Piece], str], omits_thinking: bool = False) -> None:
        self._call_id = call_id
        self._omits_thinking = omits_thinking
        self._index = -1  # index of the newest block
        self._kind = ""  # kind of the pieces of the open block, or empty if no block is open
        self._head = ""  # JSON that precedes the text in a delta of the open block

    def add(self, piece: Piece) -> str:
        """Return the events for a piece."""
        if piece.kind == CALL:
            name = self._call_id(piece)
            block = {"type": "tool_use", "id": name, "name": piece.text, "input": {}}
            return self._start(ARGUMENTS, block)
        started = ""
        if piece.kind != self._kind:
            started = self._start(piece.kind, _empty_block(piece.kind))
        if self._omits_thinking and piece.kind == REASONING:
            return started
        return f"{started}{self._head}{encode_basestring(piece.text)}}}}}\n\n"

    def add_text(self, text: str) -> str:
        """Return the events for content; faster than `add`."""
        if self._kind != CONTENT:
            return self.add(Piece(CONTENT, text))
        return f"{self._head}{encode_basestring(text)}}}}}\n\n"

    def end(self) -> str:
        """Return the events that end the open block, if there is one."""
        if not self._kind:
            return ""
        signed = ""
        if self._kind == REASONING:
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = event("content_block_delta", index=self._index, delta=delta)
        self._kind = ""
        return signed + event("content_block_stop", index=self._index)

    def _start(self, kind: str, block: Mapping[str, Any]) -> str:
        ended = self.end()
        self._index += 1
        self._kind = kind
        delta, field = DELTAS[kind]
        self._head = (
            'event: content_block_delta\ndata: {"type":"content_block_delta",'
            f'"index":{self._index},"delta":{{"type":"{delta}","{field}":'
        )
        started = event("content_block_start", index=self._index, content_block=block)
        return ended + started + (PING if self._index == 0 else "")


def blocks_of(
    pieces: Iterable[Piece], call_id: Callable[[Piece], str], omits_thinking: bool = False
) -> list[dict[str, Any]]:
    """Return the content blocks of a complete answer."""
    blocks: list[dict[str, Any]] = []
    texts: list[list[str]] = []  # text fragments of each block
    last = ""
    for piece in pieces:
        kind = ARGUMENTS if piece.kind == CALL else piece.kind
        if kind != last or piece.kind == CALL:
            is_call = piece.kind == CALL
            texts.append([])
            blocks.append(
                {"type": "tool_use", "id": call_id(piece), "name": piece.text}
                if is_call
                else _empty_block(kind)
            )
        if piece.kind != CALL and not (omits_thinking and kind == REASONING):
            texts[-1].append(piece.text)
        last = kind
    for block, pieces_of_block in zip(blocks, texts, strict=True):
        text = "".join(pieces_of_block)
        match block["type"]:
            case "tool_use":
                block["input"] = _input(text)
            case "thinking":
                block |= {"thinking": text, "signature": SIGNATURE}
            case kind:
                block[kind] = text
    return blocks


def _empty_block(kind: str) -> dict[str, Any]:
    if kind == REASONING:
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _input(text: str) -> Any:
    """Return the (possibly cut off) arguments of a call, parsed as in Anthropic's client.

    Text that is not a JSON object, or that contains a number too large for a float, is returned as
    the value of `INVALID_JSON`.
    """
    if not text:
        return {}
    try:
        found = from_json(text, allow_partial=True, allow_inf_nan=False)
        json.dumps(found, allow_nan=False)  # `from_json` reads 1e999 as infinity
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}
