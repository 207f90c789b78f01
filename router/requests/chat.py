"""The messages of a chat, and the rules for messages that hold for every API."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.common.text.chat_source import SPECIAL_TOKEN_NAMES
from penstock.router.errors import invalid
from penstock.router.requests.json_text import dumps, string
from penstock.router.requests.slices import Slices

ROLES = ("system", "developer", "user", "assistant", "tool")


RESERVED_VARIABLES = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "tokenize",
        *SPECIAL_TOKEN_NAMES,
    }
)
"""Names that a request's variables for the chat template must not have.

A request sets them by other fields, or cannot set them.
"""


def check_variables(variables: Collection[str], field: str) -> None:
    """Refuse chat template variables that a request must not set.

    `field` is the name of the request's field with the variables.
    """
    for name in variables:
        if name in RESERVED_VARIABLES:
            raise invalid(
                f"{field} contains {name}, which cannot be set there: leave it out",
                field,
            )


def check_role(role: str) -> None:
    """Refuse a message whose role is unknown to chat templates."""
    if role not in ROLES:
        raise invalid(
            f"a message's role must be one of {', '.join(ROLES)}, not {role[:40]!r}", "messages"
        )


@dataclass(frozen=True, slots=True)
class Chat:
    """The messages of a chat as JSON, which only helper processes read.

    Attributes:
        messages: a JSON array of objects; `common.text.template_messages` describes them.
        num_chars: number of characters of all strings in messages, tools and documents.
        final_text: text of the assistant's last message if the answer repeats it, else empty.
        tools: a JSON array of the tools for the template, or empty.
        functions: names and parameters of the tools, from `tool_parameters.function_lines`.
        documents: a JSON array of the documents for the template, or empty.
        forced_schema: JSON schema that forces the answer to be tool calls, or empty.
        strict_calls: see `strict_calls.strict_calls`; empty if calls are forced.
    """

    messages: bytes
    num_chars: int
    final_text: str = ""
    tools: bytes = b""
    documents: bytes = b""
    forced_schema: str = ""
    strict_calls: bytes = b""
    functions: bytes = b""


async def chat_of(
    messages: Sequence[Mapping[str, Any]], tools: bytes = b"", documents: bytes = b""
) -> Chat:
    """Return the chat with these messages, each with a role and a content.

    The tools and documents are JSON arrays or empty.
    """
    slices = Slices()
    fragments: list[bytes] = []
    count = len(tools) + len(documents)
    separator = "["
    for message in messages:
        fragments.append(separator.encode())
        for fragment in message_json(message):
            fragments.append(fragment.encode())
            await slices.pause()
        for value in _values(message):
            count += num_chars(value)
            await slices.pause()
        separator = ","
    text = b"".join((*fragments, b"]"))
    return Chat(text, count, tools=tools, documents=documents)


def _values(message: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the values whose characters `num_chars_of` counts, one by one."""
    for name, value in message.items():
        if name == "content" and isinstance(value, list):
            yield from (part["text"] for part in value)
        elif isinstance(value, list):
            yield from value
        elif name != "role":
            yield value


def array_of(values: Sequence[Any] | None) -> bytes:
    """Return values as a JSON array, or empty bytes if there are no values."""
    return dumps(values).encode() if values else b""


def num_chars_of(message: Mapping[str, Any]) -> int:
    """Return the number of characters of a message's content, reasoning and tool calls."""
    content = message["content"]
    count = len(content) if isinstance(content, str) else _num_chars_of_list(content)
    return count if len(message) == 2 else count + _num_chars_of_structure(message)


def _num_chars_of_structure(message: Mapping[str, Any]) -> int:
    members = (value for name, value in message.items() if name not in ("role", "content"))
    return sum(map(num_chars, members))


def _num_chars_of_list(content: Sequence[Mapping[str, Any]] | None) -> int:
    return sum(len(part["text"]) for part in content or ())


def final_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the last message if the assistant wrote it, else an empty string."""
    last = messages[-1]
    if last["role"] != "assistant":
        return ""
    content = last["content"] or ""
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content)


def message_json(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield a message as JSON, in fragments."""
    separator = "{"
    for name, value in message.items():
        yield f"{separator}{dumps(name)}:"
        separator = ","
        if isinstance(value, str):
            yield from string(value)
        elif isinstance(value, list):
            yield from _array_json(value)
        else:
            yield dumps(value)
    yield "}"


def _array_json(values: Sequence[Any]) -> Iterator[str]:
    separator = "["
    for value in values:
        yield separator + dumps(value)
        separator = ","
    yield "]" if values else "[]"


def num_chars(value: Mapping[str, Any] | Sequence[Any] | str | None) -> int:
    """Return the number of characters of all strings in a value, without the keys of mappings."""
    match value:
        case str():
            return len(value)
        case Mapping():
            return sum(map(num_chars, value.values()))
        case Sequence():
            return sum(map(num_chars, value))
    return 0
