"""Renders conversations to prompts. Only the chat template can write control tokens into a prompt.

A template is foreign code that may run forever. A renderer must therefore run in a process that can
be killed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from penstock.common.text.chat_source import (
    DEFAULT_OPTIONS,
    ChatSource,
    ChatTemplateError,
    TemplateOptions,
)
from penstock.common.text.chat_template import ChatTemplate
from penstock.common.text.control_tokens import ControlTokens, Segment
from penstock.common.text.template_messages import with_read_arguments


class ChatRenderer:
    """Renders conversations with one chat template, and hides control tokens in their messages.

    Raises:
        ValueError: the source is not a valid template. The message names the line.

    Attributes:
        variables: names of the variables that the template reads.
    """

    def __init__(self, source: ChatSource) -> None:
        self._template = ChatTemplate(source.template, source.special_tokens)
        self._control = ControlTokens(source.control_tokens)
        self.variables = self._template.variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: TemplateOptions = DEFAULT_OPTIONS,
    ) -> list[Segment]:
        """Return the segments of the prompt for a conversation.

        Only the template writes control tokens. Text of the messages, tools, documents and
        variables never becomes a control token.

        Raises:
            ChatTemplateError: the template fails.
        """
        messages = [with_read_arguments(message) for message in messages]
        more = {
            "variables": options.variables,
            "tools": options.tools,
            "documents": options.documents,
        }
        masked = self._control.mask([*messages, more])
        if masked is not None:
            *messages, more = masked.messages  # type: ignore[assignment]
            options = replace(options, **more)  # type: ignore[arg-type]
        try:
            text = self._template.render(messages, options)
        except ChatTemplateError as error:
            raise ChatTemplateError(f"the model's chat template: {error}") from error
        if masked is None:
            return [Segment(text, is_plain=False)]
        return list(masked.segments(text, self._control))
