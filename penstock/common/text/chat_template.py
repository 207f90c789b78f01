"""Renders a model's own Jinja chat template in a sandbox, as transformers does."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplateError(ValueError):
    """The messages cannot be rendered; the error text gives the reason and is safe for clients."""


class Generation(jinja2.ext.Extension):
    """Renders the body of the tag `{% generation %}`, which has a meaning only in training."""

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(message)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja source.
        special_tokens: values for the template's variables bos_token, eos_token, ..., named as in
            tokenizer_config.json.

    Raises:
        ValueError: the source is not a valid template; the message names the line.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, object]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt for a conversation; the assistant's answer continues this prompt.

        Raises:
            ChatTemplateError: the template rejects the messages or raises any exception. (The
                template is foreign code, so every type of exception is converted.)
        """
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except ChatTemplateError:
            raise
        except Exception as error:
            kind = type(error).__name__
            raise ChatTemplateError(f"it cannot render these messages ({kind})") from error
