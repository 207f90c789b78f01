"""Chat templates: the model's own jinja, run in a sandbox, with the names that they expect."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class TemplateRefused(ValueError):
    """The template cannot take these messages; the message says why."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own form)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise TemplateRefused(message)


def _to_json(value: object, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


class ChatTemplate:
    """A compiled template and the special tokens that it may name.

    Args:
        source: the template. `ValueError` with the line if it is not valid.
        names: bos_token, eos_token, ... as the tokenizer's configuration has them.
    """

    def __init__(self, source: str, names: Mapping[str, object]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error
        self._names = dict(names)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt of a conversation, open for the assistant's next words.

        A template is foreign code: whatever it raises is a refusal of these messages.
        """
        try:
            return self._template.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._names,
            )
        except TemplateRefused:
            raise
        except Exception as error:
            kind = type(error).__name__
            raise TemplateRefused(f"it cannot render these messages ({kind})") from error
