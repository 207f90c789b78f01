"""Chats of the gRPC API: checks, and conversion into the form for chat templates."""

from collections.abc import Callable, Sequence
from typing import Any

from pydantic_core import from_json

from penstock.common.text.chat_source import DEFAULT_OPTIONS, TemplateOptions
from penstock.common.value_text import value_text
from penstock.protos import inference_pb2 as pb
from penstock.router.config import RequestBounds
from penstock.router.errors import invalid
from penstock.router.requests.chat import Chat, chat_of, check_role, check_variables
from penstock.router.requests.slices import Slices
from penstock.router.requests.tools import check_json, check_tools

MAX_READ = RequestBounds().max_messages
"""If a chat has more messages, its content parts and tool calls are not counted."""


def chat_sizes(chat: pb.Chat) -> dict[str, int]:
    """Return the numbers of entries in the lists of a chat, as arguments of `CallSizes`."""
    # A chat with too many messages is refused for their number, so the messages are not read.
    messages = chat.messages if len(chat.messages) <= MAX_READ else ()
    return {
        "messages": len(chat.messages),
        "content_pieces": sum(len(message.content_list) for message in messages),
        "tool_calls": sum(len(message.tool_calls) for message in messages),
        "tools": len(chat.tools),
        "documents": len(chat.documents),
    }


def check_chat(chat: pb.Chat, bounds: RequestBounds) -> None:
    """Refuse a chat whose tools, documents or variables are not valid JSON, or too large.

    Large chats are checked in a helper process, because the check takes long.

    Raises:
        ServingError: INVALID; the message names the field.
    """
    depth = bounds.max_json_depth
    tools = [_object("tools", tool) for tool in chat.tools]
    check_json("tools", tools, bounds.max_tools_bytes, depth)
    check_tools(tools)
    documents = [_object("documents", document) for document in chat.documents]
    check_json("documents", documents, bounds.max_body_bytes, depth)
    if chat.template_kwargs:
        variables = _object("template_kwargs", chat.template_kwargs)
        check_json("template_kwargs", variables, bounds.max_template_kwargs)
        check_variables(variables, "template_kwargs")


async def to_chat(chat: pb.Chat) -> Chat:
    """Return a checked chat in the form for chat templates.

    Raises:
        ServingError: INVALID if a message is not valid.
    """
    if not chat.messages:
        raise invalid("'messages' is empty: send at least one message", "messages")
    slices = Slices()
    messages: list[dict[str, Any]] = []
    for message in chat.messages:
        messages.append(await _message(message, slices))
        await slices.pause()
    return await chat_of(messages, _array(chat.tools), _array(chat.documents))


def template_options(chat: pb.Chat) -> TemplateOptions:
    """Return the options for the chat template."""
    if not chat.template_kwargs:
        return DEFAULT_OPTIONS
    return TemplateOptions(variables=from_json(chat.template_kwargs))


async def _message(message: pb.ChatMessage, slices: Slices) -> dict[str, Any]:
    check_role(message.role)
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.content_list:
        if message.content:
            raise invalid(
                f"a message with the role {message.role!r} has both 'content' and 'content_list': "
                "set only one of them",
                "messages",
            )
        found["content"] = await _converted(_text_of, message.content_list, slices)
    if message.role == "tool" and not message.tool_call_id:
        raise invalid(
            "a message with the role 'tool' has no tool_call_id: set it to the id of the call",
            "messages",
        )
    if message.role != "assistant" and (message.tool_calls or message.reasoning_content):
        name = "tool_calls" if message.tool_calls else "reasoning_content"
        raise invalid(
            f"a message with the role {message.role!r} has {name}, which only the role 'assistant' "
            "may have: leave it out",
            "messages",
        )
    if message.tool_calls:
        found["content"] = found["content"] or None
        found["tool_calls"] = await _converted(_call, message.tool_calls, slices)
    for name in ("name", "tool_call_id", "reasoning_content"):
        if value := getattr(message, name):
            found[name] = value
    return found


async def _converted(
    convert: Callable[[Any], dict[str, Any]], items: Sequence[Any], slices: Slices
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for item in items:
        found.append(convert(item))
        await slices.pause()
    return found


def _text_of(given: pb.ContentPart) -> dict[str, str]:
    if given.WhichOneof("part") != "text":
        raise invalid("a content part of a message has no text: set the field 'text'", "messages")
    return {"type": "text", "text": given.text}


def _call(call: pb.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _object(name: str, text: str) -> dict[str, Any]:
    try:
        found = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"{name} is not valid JSON: {error}", name) from None
    if not isinstance(found, dict):
        raise invalid(f"{name} must be a JSON object, not {value_text(found)}", name)
    return found


def _array(objects: Sequence[str]) -> bytes:
    """Return checked JSON objects as a JSON array; empty bytes if there are none."""
    return f"[{','.join(objects)}]".encode() if objects else b""
