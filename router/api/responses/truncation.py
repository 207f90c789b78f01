"""Drops the oldest messages of a conversation that exceeds the context (`truncation: auto`)."""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.router.errors import Code, ServingError
from penstock.router.requests.chat import Chat
from penstock.router.requests.slices import Slices

BEGIN = b'{"role":"'
"""Start of each message. Texts cannot contain it, because their quotes are escaped."""

CALL_ID = b'{"id":"'
RESULT_ID = b',"tool_call_id":"'

MESSAGES_PER_SLICE = 256


@dataclass(frozen=True, slots=True)
class MessageStart:
    """The start of a message in the JSON array of a chat's messages.

    Attributes:
        offset: offset of the message's first byte.
        role: role of the message.
    """

    offset: int
    role: str


@dataclass(frozen=True, slots=True)
class ShorterChats:
    """A list of chats, from the longest to the shortest. Each chat is made only when it is needed.

    Attributes:
        chat: the whole conversation.
        head: JSON with which all chats begin: the opening bracket, and the messages that every chat
            keeps.
        offsets: for each chat, the offset of the first message after `head`.
    """

    chat: Chat
    head: bytes
    offsets: Sequence[int]

    def at(self, index: int) -> Chat:
        """Return the chat at `index`; index 0 is the longest chat."""
        separator = b"," if len(self.head) > 1 else b""
        messages = self.head + separator + self.chat.messages[self.offsets[index] :]
        # A character takes at least one byte, so the number of bytes is an upper bound.
        return replace(
            self.chat, messages=messages, num_chars=min(self.chat.num_chars, len(messages))
        )


async def message_starts(messages: bytes, first: int = 1) -> list[MessageStart]:
    """Return the start of each message from byte `first` on."""
    slices = Slices()
    found: list[MessageStart] = []
    separator = b"," + BEGIN
    at = first if messages.startswith(BEGIN, first) else messages.find(separator, first) + 1
    while at > 0:
        role = at + len(BEGIN)
        found.append(MessageStart(at, messages[role : messages.index(b'"', role)].decode()))
        at = messages.find(separator, role) + 1
        if len(found) % MESSAGES_PER_SLICE == 0:
            await slices.pause()
    return found


async def shorter_chats(chat: Chat, num_instructions: int) -> list[ShorterChats]:
    """Return lists of shorter chats, which leave out the oldest messages.

    The caller tries the lists in order. Every chat keeps the instructions and the last message. A
    chat with the result of a tool also has its call. The chats of the first list begin with a
    message of the user, because many templates require one there. The chats of the second list keep
    only a part of the last turn: the user's question and the latest messages of the assistant with
    the results of its calls.

    Args:
        chat: the whole conversation.
        num_instructions: bytes of the first message if it has the instructions, else 0.
    """
    messages, begin = chat.messages, 1 + num_instructions
    starts = await _separable(messages, await message_starts(messages, begin))
    head = messages[:begin]
    questions = [start.offset for start in starts if start.role == "user"]
    last = questions[-1] if questions else 0
    answers = [each.offset for each in starts if each.role == "assistant" and each.offset > last]
    first = starts[0].offset if starts else 0
    lists = [ShorterChats(chat, head, [offset for offset in questions if offset > first])]
    if questions:
        if answers:
            separator = b"," if num_instructions else b""
            head += separator + messages[last : answers[0] - 1]
        answers = answers[1:]
    lists.append(ShorterChats(chat, head, [offset for offset in answers if offset > first]))
    return [chats for chats in lists if chats.offsets]


async def _separable(messages: bytes, starts: Sequence[MessageStart]) -> list[MessageStart]:
    """Return the starts at which a chat can be cut.

    A cut never separates the result of a tool from its call.
    """
    slices = Slices()
    calls: dict[bytes, int] = {}
    indices: dict[int, int] = {}  # for the index of each tool result, the index of its call
    ends = [*(start.offset for start in starts[1:]), len(messages)]
    for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if start.role == "assistant":
            calls.update(dict.fromkeys(_values(messages, CALL_ID, start.offset, end), index))
        elif start.role == "tool":
            for name in _values(messages, RESULT_ID, start.offset, end):
                indices[index] = calls.get(name, index)
        if index % MESSAGES_PER_SLICE == 0:
            await slices.pause()
    found: list[MessageStart] = []
    first_call = len(starts)  # the lowest index of a call whose result is at `index` or later
    for index in reversed(range(len(starts))):
        first_call = min(first_call, indices.get(index, first_call))
        if first_call >= index:
            found.append(starts[index])
    return found[::-1]


def _values(messages: bytes, key: bytes, begin: int, end: int) -> Iterator[bytes]:
    """Yield the strings after each `key` in a message."""
    at = messages.find(key, begin, end)
    while at >= 0:
        value = at + len(key)
        at = messages.index(b'"', value)
        yield messages[value:at]
        at = messages.find(key, at, end)


async def first_that_fits(
    lists: Sequence[ShorterChats], length_of: Callable[[Chat], Awaitable[int]], max_tokens: int
) -> Chat | None:
    """Return the longest chat that fits, found by bisection; None if none fits.

    Args:
        lists: from `shorter_chats`.
        length_of: returns the number of tokens of a chat's prompt.
        max_tokens: maximum number of tokens.

    Raises:
        ServingError: the router is overloaded or stops.
    """

    async def fits(chat: Chat) -> bool:
        try:
            return await length_of(chat) <= max_tokens
        except ServingError as error:
            if error.code is not Code.INVALID:
                raise
            # The chat exceeds the limit for texts, or the chat template refuses its roles.
            return False

    for chats in lists:
        if not await fits(chats.at(-1)):
            continue
        low, high = 0, len(chats.offsets) - 1  # invariant: the chat at `high` fits
        while low < high:
            middle = (low + high) // 2
            if await fits(chats.at(middle)):
                high = middle
            else:
                low = middle + 1
        return chats.at(high)
    return None
