"""Stored responses, and the conversations that continue them."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.router.api.responses.formatter import FinishedResponse
from penstock.router.api.responses.items import repeated_id
from penstock.router.api.responses.kept import KeptContent
from penstock.router.api.responses.output import Output
from penstock.router.api.responses.response_object import ResponseObject
from penstock.router.config import RequestBounds
from penstock.router.errors import Code, ServingError, invalid
from penstock.router.requests.chat import Chat, message_json, num_chars_of
from penstock.router.requests.json_text import CHARS_PER_FRAGMENT
from penstock.router.requests.slices import Slices

log = logging.getLogger(__name__)

ENTRY_BYTES = 2048
"""Approximate memory of a stored response without its texts, in bytes."""


@dataclass(frozen=True, slots=True)
class StoredItems:
    """Some consecutive items of a conversation: the input or the output of one response.

    Attributes:
        ids: ids of the items, one per line.
        items: the items as JSON, one per line, in fragments. Large fragments stay separate, because
            joining them takes too long.
        messages: the items as messages for chat templates: JSON objects separated by commas.
        num_chars: characters of the strings in the messages.
    """

    ids: bytes
    items: Sequence[bytes]
    messages: bytes
    num_chars: int

    @property
    def num_bytes(self) -> int:
        """Size of the texts, in bytes."""
        return len(self.ids) + sum(map(len, self.items)) + len(self.messages)

    @property
    def num_items(self) -> int:
        """Number of items."""
        return self.ids.count(b"\n") + 1 if self.ids else 0

    def index_of(self, name: str) -> int | None:
        """Return the index of the item with this id, or None if there is none."""
        if not self.ids or "\n" in name:
            return None
        lines = b"\n" + self.ids + b"\n"
        found = lines.find(b"\n" + name.encode() + b"\n")
        return None if found < 0 else lines.count(b"\n", 0, found)

    def lines(self) -> list[tuple[str, list[bytes]]]:
        """Return the id of each item, and the item as JSON in fragments."""
        if not self.ids:
            return []
        items: list[list[bytes]] = [[]]
        for fragment in self.items:
            first, *others = fragment.split(b"\n")
            items[-1].append(first)
            items += [[other] for other in others]
        return list(zip(self.ids.decode().split("\n"), items, strict=True))


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response that has ended.

    Attributes:
        id: id of the response.
        body: the response as JSON, in fragments.
        input: all items before the output. Responses of one conversation share these objects.
        output: the output items.
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
        """Bytes of the response, including the items that it shares with other responses."""
        items = sum(each.num_bytes for each in self.conversation)
        return ENTRY_BYTES + sum(map(len, self.body)) + items

    @property
    def conversation(self) -> Sequence[StoredItems]:
        """All items up to the end of the output."""
        return (*self.input, self.output)


def least_bytes(items: Sequence[StoredItems], shown: bytes) -> int:
    """Return the size in bytes of a stored response without its output.

    Args:
        items: all items of its input.
        shown: the fields of the body that the response repeats.
    """
    return 2 * ENTRY_BYTES + sum(each.num_bytes for each in items) + len(shown)


def check_stored_input(items: Sequence[StoredItems], shown: bytes, max_bytes: int) -> None:
    """Refuse to store a response whose input alone is too large.

    Raises:
        ServingError: INVALID.
    """
    size = least_bytes(items, shown) + ENTRY_BYTES
    if size > max_bytes:
        raise invalid(
            f"the conversation takes {size} bytes; at most {max_bytes} can be stored: set 'store' "
            "to false, or begin a new conversation",
            "store",
        )


async def check_ids(content: KeptContent, history: Sequence[StoredItems]) -> None:
    """Refuse input items whose ids are those of earlier items of the conversation.

    Raises:
        ServingError: INVALID.
    """
    if not history or not content.ids:
        return
    own, slices = set(content.ids.split(b"\n")), Slices()
    for items in history:
        for name in items.ids.split(b"\n"):
            if name in own:
                raise repeated_id(name.decode())
        await slices.pause()


def own_items(chat: Chat, content: KeptContent) -> StoredItems:
    """Return the input items of a body, without the instructions and the tools."""
    begin = 1 + content.num_instructions
    if content.num_instructions and chat.messages[begin : begin + 1] == b",":
        begin += 1
    count = chat.num_chars - content.other_chars
    return StoredItems(content.ids, (content.items,), chat.messages[begin:-1], count)


def joined_chat(
    chat: Chat, content: KeptContent, history: Sequence[StoredItems], bounds: RequestBounds
) -> Chat:
    """Return a chat that continues a conversation.

    The new chat's instructions come first. Instructions of earlier responses are not part of the
    conversation.

    Args:
        chat: the chat of the body.
        content: the other texts of the body.
        history: the items of the conversation.
        bounds: limits on the number of items and on the bytes of all messages.

    Raises:
        ServingError: INVALID if the conversation is too large.
    """
    if not history:
        return chat
    instructions = chat.messages[1 : 1 + content.num_instructions]
    items = (*history, own_items(chat, content))
    count = sum(each.num_items for each in items)
    if count > bounds.max_messages:
        raise invalid(
            f"the conversation has {count} items; at most {bounds.max_messages} are allowed: begin "
            "a new one",
            "previous_response_id",
        )
    lists = [each.messages for each in items]
    messages = b"[" + b",".join(each for each in (instructions, *lists) if each) + b"]"
    if len(messages) > bounds.max_body_bytes:
        raise invalid(
            f"the conversation has {len(messages)} bytes as JSON; at most {bounds.max_body_bytes} "
            "are allowed: begin a new one",
            "previous_response_id",
        )
    num_chars = chat.num_chars + sum(each.num_chars for each in history)
    return replace(chat, messages=messages, num_chars=num_chars)


class ResponseRecorder:
    """Stores a response when it has ended (a `Recorder`).

    Args:
        response: the constant members of the response.
        items: all items of its input.
        max_bytes: the largest size of a stored response.
        put: stores the response.
    """

    def __init__(
        self,
        response: ResponseObject,
        items: Sequence[StoredItems],
        max_bytes: int,
        put: Callable[[StoredResponse], None],
    ) -> None:
        self._response = response
        self._input = items
        self._max_bytes = max_bytes
        self._put = put
        self._is_kept = response.is_stored

    def keeps(self, num_bytes: int) -> bool:
        """Return whether a response whose output has `num_bytes` as JSON will be stored.

        Raises:
            ServingError: TOO_LARGE if the response cannot be stored and was generated in the
                background, so that it would be lost.
        """
        response = self._response
        if not response.is_stored:
            return False
        # The output counts three times: in the response, as items and as messages.
        size = least_bytes(self._input, response.shown.encode()) + 3 * num_bytes
        self._is_kept = size <= self._max_bytes
        if self._is_kept:
            return True
        problem = f"the response and its conversation take {size} bytes; at most {self._max_bytes}"
        if response.is_background:
            raise ServingError(Code.TOO_LARGE, f"{problem} can be stored", "background")
        log.warning("the response %s is not stored: %s can be stored", response.id, problem)
        return False

    def record(self, finished: FinishedResponse) -> Iterator[str]:
        """Store the response if it is to be stored; yield an empty text after each short step."""
        if not self._is_kept:
            return
        body: list[bytes] = []
        yield from _encode(finished.body, body)
        items: list[bytes] = []
        messages: list[bytes] = []
        yield from _encode(_item_lines(finished.output), items)
        shown = finished.output.messages(finished.status == "incomplete")
        yield from _encode(_message_list(shown), messages)
        ids = "\n".join(item.id for item in finished.output.items).encode()
        count = sum(map(num_chars_of, shown))
        output = StoredItems(ids, items, b"".join(messages), count)
        self._put(
            StoredResponse(
                self._response.id,
                body,
                self._input,
                output,
                finished.status in ("completed", "incomplete"),
                self._response.is_background,
            )
        )


def _encode(fragments: Iterable[str], into: list[bytes]) -> Iterator[str]:
    """Append fragments to `into`, joined into larger ones; yield an empty text per fragment."""
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
