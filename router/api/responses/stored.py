"""Stored responses, and the conversations that continue them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.router.api.responses.formatter import FinishedResponse
from penstock.router.api.responses.kept import KeptContent
from penstock.router.api.responses.output import Output
from penstock.router.api.responses.response_object import ResponseObject
from penstock.router.errors import invalid
from penstock.router.requests.chat import Chat, message_json, num_chars_of
from penstock.router.requests.json_text import CHARS_PER_FRAGMENT

ENTRY_BYTES = 2048
"""Approximate memory of a stored response without its texts, in bytes."""


@dataclass(frozen=True, slots=True)
class StoredItems:
    """Some consecutive items of a conversation: an input, or an output.

    Attributes:
        ids: ids of the items, one per line.
        items: the items as JSON, one per line.
        messages: the items as messages for chat templates: JSON objects separated by commas.
        num_chars: characters of the strings in the messages.
    """

    ids: bytes
    items: bytes
    messages: bytes
    num_chars: int

    @property
    def num_bytes(self) -> int:
        """Size of the texts."""
        return len(self.ids) + len(self.items) + len(self.messages)


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that has ended.

    Attributes:
        id: id of the response.
        body: the response as JSON, in fragments.
        input: all items before the output; the responses of one conversation share them.
        output: the output.
        is_complete: whether the response may be continued: it has neither failed nor been canceled.
        is_background: whether it was generated in the background.
    """

    id: str
    body: Sequence[bytes]
    input: Sequence[StoredItems]
    output: StoredItems
    is_complete: bool = True
    is_background: bool = False

    @property
    def num_bytes(self) -> int:
        """Memory of the response; shared items are counted in each response."""
        items = sum(each.num_bytes for each in self.conversation)
        return ENTRY_BYTES + sum(map(len, self.body)) + items

    @property
    def conversation(self) -> Sequence[StoredItems]:
        """All items up to the end of the output."""
        return (*self.input, self.output)


def own_items(chat: Chat, content: KeptContent) -> StoredItems:
    """Return the input of a body, without the instructions."""
    begin = 1 + content.num_instructions
    if content.num_instructions and chat.messages[begin : begin + 1] == b",":
        begin += 1
    count = chat.num_chars - content.instruction_chars
    return StoredItems(content.ids, content.items, chat.messages[begin:-1], count)


def joined_chat(
    chat: Chat, content: KeptContent, history: Sequence[StoredItems], max_bytes: int
) -> Chat:
    """Return a chat that continues a conversation.

    The instructions stay in front. Those of earlier responses are not part of the conversation.

    Args:
        chat: the chat of the body.
        content: the other texts of the body.
        history: the items of the conversation.
        max_bytes: maximum size of all messages.

    Raises:
        ServingError: INVALID if the conversation is too large.
    """
    if not history:
        return chat
    instructions = chat.messages[1 : 1 + content.num_instructions]
    lists = [items.messages for items in (*history, own_items(chat, content))]
    messages = b"[" + b",".join(each for each in (instructions, *lists) if each) + b"]"
    if len(messages) > max_bytes:
        raise invalid(
            f"the conversation has {len(messages)} bytes as JSON; at most {max_bytes} are allowed: "
            "begin a new one",
            "previous_response_id",
        )
    count = chat.num_chars + sum(items.num_chars for items in history)
    return replace(chat, messages=messages, num_chars=count)


class ResponseRecorder:
    """Makes a stored response from a finished one, step by step.

    Args:
        response: the constant members of the response.
        items: all items of its input.
    """

    def __init__(self, response: ResponseObject, items: Sequence[StoredItems]) -> None:
        self._response = response
        self._input = items
        self.stored: StoredResponse | None = None

    def record(self, finished: FinishedResponse) -> Iterator[str]:
        """Make the stored response; yield an empty text after each short step."""
        body: list[bytes] = []
        yield from _encode(finished.body, body)
        items: list[bytes] = []
        messages: list[bytes] = []
        yield from _encode(_item_lines(finished.output), items)
        shown = finished.output.messages()
        yield from _encode(_message_list(shown), messages)
        ids = "\n".join(item.id for item in finished.output.items).encode()
        count = sum(map(num_chars_of, shown))
        output = StoredItems(ids, b"".join(items), b"".join(messages), count)
        self.stored = StoredResponse(
            self._response.id,
            body,
            self._input,
            output,
            finished.is_complete,
            self._response.is_background,
        )


def _encode(fragments: Iterable[str], into: list[bytes]) -> Iterator[str]:
    """Append fragments to `into`, joined into larger ones; yield an empty text after each."""
    texts: list[str] = []
    size = 0
    for fragment in fragments:
        texts.append(fragment)
        size += len(fragment)
        if size >= CHARS_PER_FRAGMENT:
            into.append("".join(texts).encode())
            texts.clear()
            size = 0
        yield ""
    into.append("".join(texts).encode())


def _item_lines(output: Output) -> Iterator[str]:
    for item in output.items:
        yield "\n" if item.index else ""
        yield from item.json("completed")


def _message_list(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for index, message in enumerate(messages):
        yield "," if index else ""
        yield from message_json(message)
