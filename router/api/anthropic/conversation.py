"""Messages of Anthropic's API in the form for chat templates."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from penstock.router.api.anthropic.blocks import (
    Message,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    texts_of,
    unsupported,
)
from penstock.router.errors import invalid
from penstock.router.requests.json_text import dumps

Located: TypeAlias = tuple[str, Any]
"""A block or a text, with its path in the body."""

ERROR = "Error: "
"""Prefix of the result of a failed tool, because chat templates have no field for failures."""


def conversation(
    system: str | Sequence[Any] | None, messages: Sequence[Message]
) -> list[dict[str, Any]]:
    """Return all messages; merge consecutive messages of the user, or of the assistant, into one.

    Raises:
        ServingError: INVALID if a block is not allowed in its message, or a result has no call.
    """
    if not messages:
        raise invalid("'messages' is empty: send at least one message", "messages")
    texts = texts_of(system, "system")
    found = [{"role": "system", "content": _content(texts)}] if any(texts) else []
    names: dict[str, str] = {}  # names of called tools, by the id of the call
    for role, blocks in _merged(messages):
        match role:
            case "system":
                found.append({"role": role, "content": _content(_system_texts(blocks))})
            case "user":
                found += _user(blocks, names)
            case "assistant":
                found.append(_assistant(blocks, names))
    return found


def continues_last(messages: Sequence[Message]) -> bool:
    """Return True if the last message is from the assistant, so that the answer continues its text.

    Raises:
        ServingError: INVALID if that message does not end with text, or contains calls.
    """
    role, blocks = list(_merged(messages))[-1] if messages else ("user", [])
    if role != "assistant":
        return False
    where, last = blocks[-1] if blocks else ("messages", "")
    if not isinstance(last, str | TextBlock):
        raise invalid(
            f"{where}: the answer continues the last message, which has the role 'assistant': end "
            "this message with a block of type 'text'",
            "messages",
        )
    for where, block in blocks:
        if isinstance(block, ToolUseBlock):
            raise invalid(
                f"{where}: the answer continues the last message, which has the role 'assistant' "
                "and must not contain blocks of type 'tool_use', because chat templates write "
                "calls after the text: add a 'user' message with the results",
                "messages",
            )
    return True


def _merged(messages: Sequence[Message]) -> Iterator[tuple[str, list[Located]]]:
    """Yield the role and the blocks of each turn: consecutive messages of the user or assistant."""
    blocks: list[Located] = []
    role = ""
    for index, message in enumerate(messages):
        where = f"messages.{index}.content"
        if blocks and (message.role != role or role == "system"):
            yield role, blocks
            blocks = []
        role = message.role
        if isinstance(message.content, str):
            blocks.append((where, message.content))
            continue
        if not message.content and (role != "assistant" or index + 1 < len(messages)):
            raise invalid(f"{where} is empty: send at least one block", "messages")
        blocks += [(f"{where}.{number}", block) for number, block in enumerate(message.content)]
    yield role, blocks


def _system_texts(blocks: Sequence[Located]) -> list[str]:
    return [_text(block, where, "text") for where, block in blocks]


def _text(block: Any, where: str, *supported: str) -> str:
    if isinstance(block, str):
        return block
    if isinstance(block, TextBlock):
        return block.checked(where)
    raise unsupported(block, where, *supported)


def _user(blocks: Sequence[Located], names: dict[str, str]) -> list[dict[str, Any]]:
    """Return a turn of the user: its texts, and a message for each result of a tool."""
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    for where, block in blocks:
        if not isinstance(block, ToolResultBlock):
            texts.append(_text(block, where, "text", "tool_result"))
            continue
        if texts:
            found.append({"role": "user", "content": _content(texts)})
            texts = []
        found.append(_result(block, where, names))
    if texts:
        found.append({"role": "user", "content": _content(texts)})
    return found


def _result(block: ToolResultBlock, where: str, names: dict[str, str]) -> dict[str, Any]:
    block.check(where)
    name = names.get(block.tool_use_id)
    if name is None:
        raise invalid(
            f"{where}.tool_use_id is {block.tool_use_id[:80]!r}, but no earlier tool_use block "
            "has this id: send the id of an earlier tool_use block",
            "messages",
        )
    texts = texts_of(block.content, f"{where}.content")
    if block.is_error:
        texts = [ERROR + (texts[0] if texts else ""), *texts[1:]]
    return {
        "role": "tool",
        "content": _content(texts),
        "name": name,
        "tool_call_id": block.tool_use_id,
    }


def _assistant(blocks: Sequence[Located], names: dict[str, str]) -> dict[str, Any]:
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[dict[str, Any]] = []
    for where, block in blocks:
        match block:
            case ThinkingBlock():
                reasoning.append(block.thinking)
            case RedactedThinkingBlock():
                pass
            case ToolUseBlock():
                block.check(where)
                names[block.id] = block.name
                function = {"name": block.name, "arguments": dumps(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case _:
                texts.append(_text(block, where, "text", "thinking", "tool_use"))
    message: dict[str, Any] = {"role": "assistant"}
    message["content"] = None if calls and not texts else _content(texts)
    if thought := "".join(reasoning):
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def _content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    """Return texts as the content of a message.

    The content is a string for at most one text, otherwise a list of text parts.
    """
    if len(texts) < 2:
        return texts[0] if texts else ""
    return [{"type": "text", "text": text} for text in texts]
