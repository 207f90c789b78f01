"""The job with which a helper process renders a chat."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.common.text.call_arguments import read_arguments
from penstock.common.text.chat_renderer import ChatRenderer
from penstock.common.text.chat_source import ChatTemplateError, TemplateOptions
from penstock.router.errors import CONTEXT_LENGTH_EXCEEDED, invalid
from penstock.router.requests.chat_rendering import NO_TEMPLATE, TEMPLATE


def render_job(renderer: ChatRenderer | None, items: Sequence[bytes]) -> list[bytes]:
    """Render the chat of a job.

    Returns a flag byte for each segment (1: plain text), then the segments' texts.
    """
    if renderer is None:
        raise invalid(NO_TEMPLATE, "messages")
    max_chars, add_prompt, continues, variables = json.loads(items[0])
    tools, documents = (json.loads(item) if item else None for item in items[2:4])
    options = TemplateOptions(add_prompt, continues, variables, tools, documents)
    messages = json.loads(items[1])
    try:
        segments = renderer.render(messages, options)
    except ChatTemplateError as error:
        raise invalid(f"{error}{_hint(messages)}", "messages") from error
    num_chars = sum(len(segment.text) for segment in segments)
    if num_chars > max_chars:
        raise invalid(
            f"{TEMPLATE} makes {num_chars} characters of these messages; at most {max_chars} can "
            "fit in the model's context: shorten the messages",
            "messages",
            CONTEXT_LENGTH_EXCEEDED,
        )
    flags = bytes(segment.is_plain for segment in segments)
    return [flags, *(segment.text.encode(errors="replace") for segment in segments)]


def _hint(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence about the first call whose arguments are not a JSON object, if any."""
    for message in messages:
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if not isinstance(read_arguments(arguments), dict):
                return (
                    f". A possible cause: the arguments of a call of {name[:80]!r} are not a JSON "
                    "object: leave out this call and its result"
                )
    return ""
