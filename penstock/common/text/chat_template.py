"""Renders a model's own Jinja chat template in a sandbox, as transformers does."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from penstock.common.text.chat_source import DEFAULT_OPTIONS, ChatTemplateError, TemplateOptions
from penstock.common.text.content_forms import content_forms
from penstock.common.text.template_messages import to_json, with_form

_PRIVATE_USE = range(0x100000, 0x10FFFE)
"""Private-use characters of Unicode (Area-B, because `control_tokens` uses Area-A)."""


class Generation(jinja2.ext.Extension):
    """Renders the body of the tag `{% generation %}`.

    The tag itself is ignored, because only training needs it.
    """

    tags = {"generation"}  # noqa: RUF012 (declared so by Jinja)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: the Jinja source.
        special_tokens: values of the template's variables bos_token, eos_token and so on. The names
            are those of tokenizer_config.json.

    Raises:
        ValueError: the source is not a valid template. The message names the line.

    Attributes:
        variables: names of the variables that the template reads.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, object]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[Generation, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template is not valid: {error}") from error
        parsed = environment.parse(source)
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(parsed))
        with_tools, without_tools = _branches(parsed)
        self._forms_with_tools = content_forms(with_tools)
        self._forms = content_forms(without_tools)
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: TemplateOptions = DEFAULT_OPTIONS,
    ) -> str:
        """Return the prompt for a conversation. The assistant's answer continues the prompt.

        Each message gets the form that the template reads (see `template_messages.with_form`).

        Raises:
            ChatTemplateError: the template rejects the messages or raises any exception. All types
                of exceptions are converted, because the template is foreign code.
            MemoryError: the process has no memory left.
        """
        forms = self._forms_with_tools if options.tools else self._forms
        shown = [with_form(message, forms) for message in messages]
        if not options.continue_final_message:
            return self._render(shown, options)
        # The template may add text after the last message, so a mark shows where the message ends.
        mark = _unused_character(messages)
        shown[-1] = _append(shown[-1], mark)
        text, found, _ = self._render(shown, options).rpartition(mark)
        if not found:
            raise ChatTemplateError(
                "it leaves out the last message, so the answer cannot continue this message: add a "
                "message of another role at the end, or leave out continue_final_message"
            )
        return text.replace(mark, "")

    def _render(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions) -> str:
        fixed = {
            "messages": messages,
            "tools": options.tools,
            "documents": options.documents,
            "add_generation_prompt": options.add_generation_prompt
            and not options.continue_final_message,
            **self._special_tokens,
        }
        try:
            return self._template.render({**options.variables, **fixed})
        except (ChatTemplateError, MemoryError):
            raise
        except Exception as error:
            kind = type(error).__name__
            raise ChatTemplateError(
                f"it cannot render these messages ({kind}): check the messages' roles and order"
            ) from error


def _unused_character(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a private-use character of Unicode that does not occur in `messages`."""
    used = set(json.dumps(messages, ensure_ascii=False))
    return next(chr(code) for code in _PRIVATE_USE if chr(code) not in used)


def _append(message: Mapping[str, Any], text: str) -> Mapping[str, Any]:
    """Return a message with `text` at the end of its content."""
    content = message["content"] or ""
    if isinstance(content, str):
        return {**message, "content": content + text}
    *others, last = content
    return {**message, "content": [*others, {**last, "text": last["text"] + text}]}


def _branches(template: jinja2.nodes.Template) -> tuple[jinja2.nodes.Template, ...]:
    """Return the parts of a template that render chats with tools and chats without tools.

    If the template is not a single condition on `tools` (as `named_templates.join_templates` makes
    it), both parts are the whole template.
    """
    match template.body:
        case [jinja2.nodes.If(test=jinja2.nodes.Name(name="tools"), elif_=[]) as whole]:
            return jinja2.nodes.Template(whole.body), jinja2.nodes.Template(whole.else_)
    return template, template
