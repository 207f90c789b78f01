"""The messages of a conversation, in the form that a chat template reads.

A message is a mapping in OpenAI's form. It has a role and a content. The content is a string, a
list of text parts, or None. A message may also have `name`, `tool_calls`, `tool_call_id` and
`reasoning_content`. Templates are written for transformers, whose messages have a different form
(see `with_form`).
"""

import json
from collections.abc import Mapping
from typing import Any

from penstock.common.text.call_arguments import read_arguments
from penstock.common.text.content_forms import ContentForms


def to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return a value as JSON. Chat templates call this function as the filter `tojson`.

    The arguments are those of the filter in transformers.
    """
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


class Arguments(dict[str, Any]):
    """The arguments of a tool call: a mapping that `str` and `+` convert to its JSON text.

    Most templates read a mapping, as in transformers. Others append the arguments to a text.
    """

    def __str__(self) -> str:
        return to_json(self)

    def __add__(self, other: object) -> str:
        return f"{self}{other}"

    def __radd__(self, other: object) -> str:
        return f"{other}{self}"


def with_read_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message in which the arguments of tool calls are mappings instead of JSON texts.

    Arguments whose text is not a JSON object remain a text, for example the arguments in an
    interrupted answer. An empty text becomes an empty mapping.

    Call this before control tokens in the message are replaced, because a JSON text may contain a
    control token as escape sequences.
    """
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_with_arguments(call, read_arguments) for call in calls]}


def with_form(message: Mapping[str, Any], forms: ContentForms) -> Mapping[str, Any]:
    """Return a message in the form that a template with these `forms` reads.

    - If the template reads only lists of content parts, a string becomes a list of one part.
    - If the template reads only strings, the content parts are joined by line breaks, as in vLLM.
    - The content None becomes an empty string, unless the template tests for None.
    - The arguments of tool calls become `Arguments`.
    - The reasoning gets all the names by which the template reads it.
    """
    content = message.get("content")
    if isinstance(content, str) and not forms.string:
        message = {**message, "content": [{"type": "text", "text": content}]}
    elif isinstance(content, list) and not forms.lists:
        message = {**message, "content": "\n".join(part["text"] for part in content)}
    elif content is None and not forms.none:
        message = {**message, "content": ""}
    if message.get("tool_calls"):
        calls = [_with_arguments(call, _as_arguments) for call in message["tool_calls"]]
        message = {**message, "tool_calls": calls}
    reasoning = message.get("reasoning_content")
    if reasoning is not None:
        message = {**message, **dict.fromkeys(forms.reasoning_names, reasoning)}
    return message


def _with_arguments(call: Mapping[str, Any], change: Any) -> Mapping[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": change(function["arguments"])}}


def _as_arguments(arguments: object) -> object:
    return Arguments(arguments) if isinstance(arguments, Mapping) else arguments
