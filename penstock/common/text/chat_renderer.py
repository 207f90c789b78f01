"""Renders conversations to prompts whose control tokens come from the chat template only.

A template is foreign code that may never end: run a renderer only in a process that can be killed.
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


class ChatRenderer:
    """A compiled chat template, and the control tokens that messages must not contain.

    Raises:
        ValueError: the source is not a valid template; the message names the line.

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

        Text of the messages and of the template's variables never becomes a control token: only the
        template writes these.

        Raises:
            ChatTemplateError: the template fails.
        """
        masked = self._control.mask([*messages, options.variables])
        if masked is not None:
            *messages, variables = masked.messages
            options = replace(options, variables=variables)
        try:
            text = self._template.render(messages, options)
        except ChatTemplateError as error:
            raise ChatTemplateError(f"the model's chat template: {error}") from error
        if masked is None:
            return [Segment(text, is_plain=False)]
        return list(masked.segments(text, self._control))
