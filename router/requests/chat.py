"""The messages of a chat, and rules for them that hold for every API."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.router.errors import invalid
from penstock.router.requests.json_text import dumps, string
from penstock.router.requests.slices import Slices

ROLES = ("system", "developer", "user", "assistant")


def check_role(role: str) -> None:
    """Refuse a message's role that chat templates do not know."""
    if role not in ROLES:
        raise invalid(f"a message's role must be one of {', '.join(ROLES)}", "messages")


@dataclass(frozen=True, slots=True)
class Chat:
    """The messages of a chat as JSON, which only helper processes read.

    Attributes:
        messages: a JSON array of objects, each with a role and a content: a string or a list of
            text parts.
        num_chars: number of characters of all contents.
        final_text: text of the last message if it is the assistant's and the answer repeats it,
            else empty.
    """

    messages: bytes
    num_chars: int
    final_text: str = ""


async def chat_of(messages: Sequence[Mapping[str, Any]]) -> Chat:
    """Return the chat with these messages, each with a role and a content."""
    slices = Slices()
    fragments: list[str] = []
    separator = "["
    for message in messages:
        fragments.append(separator)
        for fragment in _message(message):
            fragments.append(fragment)
            await slices.pause()
        separator = ","
    text = "".join((*fragments, "]"))
    num_chars = sum(num_chars_of(message["content"]) for message in messages)
    return Chat(text.encode(), num_chars)


def num_chars_of(content: str | Sequence[Mapping[str, Any]]) -> int:
    """Return the number of characters of a message's content."""
    if isinstance(content, str):
        return len(content)
    return sum(len(part["text"]) for part in content)


def final_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message if it is the assistant's, else an empty string."""
    last = messages[-1]
    if last["role"] != "assistant":
        return ""
    content = last["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def _message(message: Mapping[str, Any]) -> Iterator[str]:
    content = message["content"]
    yield f'{{"role":{dumps(message["role"])},"content":'
    if isinstance(content, str):
        yield from string(content)
    else:
        yield dumps(content)
    yield "}"
