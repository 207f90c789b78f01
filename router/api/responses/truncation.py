"""Drops the oldest messages of a conversation that exceeds the context (`truncation: auto`)."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from penstock.router.errors import Code, ServingError
from penstock.router.requests.chat import Chat

BEGIN = b'{"role":"'
"""Start of each message; within texts, quotes are escaped."""


@dataclass(frozen=True, slots=True)
class MessageStart:
    """The start of a message in the JSON array of a chat's messages.

    Attributes:
        offset: its first byte.
        role: role of the message.
    """

    offset: int
    role: str


def message_starts(messages: bytes, first: int = 1) -> list[MessageStart]:
    """Return the start of each message from byte `first` on."""
    found: list[MessageStart] = []
    separator = b"," + BEGIN
    at = first if messages.startswith(BEGIN, first) else messages.find(separator, first) + 1
    while at > 0:
        role = at + len(BEGIN)
        found.append(MessageStart(at, messages[role : messages.index(b'"', role)].decode()))
        at = messages.find(separator, role) + 1
    return found


def shorter_chats(chat: Chat, num_instructions: int) -> list[list[Chat]]:
    """Return chats without the oldest messages: lists of ever shorter ones, the best list first.

    The instructions, the last message, and the call of each result stay. The chats of the first
    list begin with a message of the user, because many templates need one there. If none of them
    fits, those of the second list keep only a part of the last turn.

    Args:
        chat: the whole conversation.
        num_instructions: bytes of the first message, if it has the instructions.
    """
    starts = message_starts(chat.messages, 1 + num_instructions)[1:]
    questions = [start.offset for start in starts if start.role not in ("assistant", "tool")]
    last = questions[-1] if questions else 0
    answers = [each.offset for each in starts if each.role == "assistant" and each.offset > last]
    head = chat.messages[: 1 + num_instructions]
    lists = (questions, answers)
    return [[_without(chat, head, offset) for offset in each] for each in lists if each]


def _without(chat: Chat, head: bytes, offset: int) -> Chat:
    messages = head + (b"," if len(head) > 1 else b"") + chat.messages[offset:]
    # Each character takes at least one byte.
    return replace(chat, messages=messages, num_chars=min(chat.num_chars, len(messages)))


async def first_that_fits(
    lists: Sequence[Sequence[Chat]], length_of: Callable[[Chat], Awaitable[int]], max_tokens: int
) -> Chat | None:
    """Return the longest chat that fits, by bisection; None: none of them fits.

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
            return False  # it is too long to be encoded, or the template refuses its roles

    for chats in lists:
        if not await fits(chats[-1]):
            continue
        low, high = 0, len(chats) - 1  # chats[high] fits
        while low < high:
            middle = (low + high) // 2
            if await fits(chats[middle]):
                high = middle
            else:
                low = middle + 1
        return chats[high]
    return None
