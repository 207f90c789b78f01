"""The output items of a response."""

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.common.text.call_arguments import read_arguments
from penstock.router.api.openai.json_fragments import array, dumps
from penstock.router.api.responses.items import PREFIXES, Conversation, InputItem, TextContent
from penstock.router.parsers.pieces import ARGUMENTS, CALL, CONTENT, REASONING, Piece
from penstock.router.requests.json_text import string

KINDS: Mapping[str, str] = {
    CONTENT: "message",
    REASONING: "reasoning",
    CALL: "function_call",
    ARGUMENTS: "function_call",
}
"""For each kind of piece, the type of the item that contains such pieces."""

CONTENT_TYPES: Mapping[str, str] = {"message": "output_text", "reasoning": "reasoning_text"}
"""For each type of item with a content part, the type of the content part."""


class OutputItem:
    """One item: a message, reasoning or a function call.

    Attributes:
        kind: type of the item.
        id: id of the item.
        index: index of the item in the output.
        name: name of the called function, or empty.
        call_id: id of the call, or empty.
        logprobs: log probabilities of the tokens, as one JSON text per token.
    """

    def __init__(self, kind: str, name: str, index: int, function: str, call_id: str) -> None:
        self.kind = kind
        self.id = name
        self.index = index
        self.name = function
        self.call_id = call_id
        self.logprobs: list[str] = []
        self._text = io.StringIO()
        self.write = self._text.write  # appends to the text of the item

    def add(self, piece: Piece, logprobs: Sequence[str]) -> None:
        """Append a piece, with the log probabilities of its tokens if it is content."""
        if piece.kind != CALL:
            self.write(piece.text)
        if logprobs and piece.kind == CONTENT:
            self.logprobs.extend(logprobs)

    def text_json(self) -> Iterator[str]:
        """Yield the text, or the arguments of the call, as a JSON string."""
        return string(self._text.getvalue())

    def content_json(self) -> Iterator[str]:
        """Yield the content part of a message or of reasoning."""
        yield f'{{"type":"{CONTENT_TYPES[self.kind]}","text":'
        yield from self.text_json()
        if self.kind == "message":
            yield ',"annotations":[],"logprobs":'
            yield from array(self.logprobs)
        yield "}"

    @property
    def has_content(self) -> bool:
        """True if the text is in a content part."""
        return self.kind in CONTENT_TYPES

    @property
    def is_broken_call(self) -> bool:
        """True if the item is a call whose arguments are not a JSON object."""
        is_call = self.kind == "function_call"
        return is_call and not isinstance(read_arguments(self._text.getvalue()), dict)

    def empty_content_json(self) -> str:
        """Return the JSON of the content part, with an empty text."""
        is_message = self.kind == "message"
        extra: Mapping[str, Any] = {"annotations": [], "logprobs": []} if is_message else {}
        return dumps({"type": CONTENT_TYPES[self.kind], "text": "", **extra})

    def begun_json(self) -> str:
        """Return the item without text."""
        empty: Mapping[str, Any] = {"content": []} if self.has_content else {"arguments": ""}
        return dumps({**self._members("in_progress"), **empty})

    def _members(self, status: str) -> dict[str, Any]:
        members: dict[str, Any] = {"id": self.id, "type": self.kind, "status": status}
        match self.kind:
            case "message":
                return {**members, "role": "assistant"}
            case "reasoning":
                return {**members, "summary": []}
        return {**members, "call_id": self.call_id, "name": self.name}

    def json(self, status: str) -> Iterator[str]:
        """Yield the item with its text; `status` is completed or incomplete."""
        yield dumps(self._members(status))[:-1]
        if self.kind == "function_call":
            yield ',"arguments":'
            yield from self.text_json()
            yield "}"
            return
        yield ',"content":['
        yield from self.content_json()
        yield "]}"

    def as_input(self) -> InputItem:
        """Return the item in the form of an input item for a later response."""
        text = self._text.getvalue()
        make = InputItem.model_construct
        match self.kind:
            case "message":
                return make(type="message", role="assistant", content=text)
            case "reasoning":
                part = TextContent.model_construct(type="reasoning_text", text=text)
                return make(type="reasoning", content=[part])
        return make(type=self.kind, call_id=self.call_id, name=self.name, arguments=text)


class Output:
    """The output items of one answer, made from its pieces as they arrive.

    Args:
        suffix: makes the ids of the items unique.
    """

    def __init__(self, suffix: str) -> None:
        self.items: list[OutputItem] = []
        self._suffix = suffix
        self._key: tuple[str, int] = ("", -1)  # type of the last item, and index of its call

    @property
    def last(self) -> OutputItem:
        """The item to which the next piece may be added."""
        return self.items[-1]

    def continues(self, piece: Piece) -> bool:
        """Return whether a piece belongs to the last item."""
        return piece.kind != CALL and (KINDS[piece.kind], piece.call) == self._key

    def begin(self, piece: Piece, call_id: str) -> OutputItem:
        """Append and return the item that a piece begins."""
        kind, index = KINDS[piece.kind], len(self.items)
        name = f"{PREFIXES[kind]}_{self._suffix}{index:04x}"
        function = piece.text if piece.kind == CALL else ""
        item = OutputItem(kind, name, index, function, call_id if function else "")
        self.items.append(item)
        self._key = (kind, piece.call)
        return item

    def json(self, last_status: str) -> Iterator[str]:
        """Yield all items as a JSON array; `last_status` is the status of the last item."""
        yield "["
        for item in self.items:
            yield "," if item.index else ""
            is_last = item.index == len(self.items) - 1
            yield from item.json(last_status if is_last else "completed")
        yield "]"

    def messages(self, is_incomplete: bool) -> Sequence[Mapping[str, Any]]:
        """Return the items as messages for chat templates.

        If the answer `is_incomplete`, its last call is left out unless the arguments are a JSON
        object, because many templates cannot read other arguments. A message without text then
        replaces an answer that has nothing else.
        """
        conversation = Conversation()
        for item in self.items:
            if not (is_incomplete and item is self.last and item.is_broken_call):
                conversation.add(item.as_input())
            elif not conversation.messages:
                conversation.add(OutputItem("message", "", 0, "", "").as_input())
        return conversation.messages
