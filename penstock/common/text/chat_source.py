"""A model's chat template as it was read, and the options with which it is rendered.

This module does not compile templates, because their sources are foreign code (see
`chat_renderer`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")


@dataclass(frozen=True, slots=True)
class ChatSource:
    """A chat template that has not been compiled.

    Attributes:
        template: the Jinja source.
        special_tokens: values of the template's variables bos_token, eos_token and so on. The names
            are those of tokenizer_config.json.
        control_tokens: texts that become control tokens if the template writes them, but stay plain
            text if a message contains them.
    """

    template: str
    special_tokens: Mapping[str, str]
    control_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """Options for rendering a conversation. Names and defaults are those of transformers.

    Attributes:
        add_generation_prompt: whether the prompt ends with the start of an answer.
        continue_final_message: whether the prompt ends with the text of the last message, so that
            the answer continues this message.
        tools: the tools that the model may call, as JSON schemas in OpenAI's form, or None.
        documents: documents that the answer may use, or None.
        variables: further variables of the template.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[Any] | None = None
    documents: Sequence[Any] | None = None


DEFAULT_OPTIONS = TemplateOptions()


class ChatTemplateError(ValueError):
    """The messages cannot be rendered.

    The text of the error gives the reason and may be shown to clients.
    """
