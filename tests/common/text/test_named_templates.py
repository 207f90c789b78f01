"""Models with a template of their own for chats with tools, as in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.common.text.chat_source import TemplateOptions
from penstock.common.text.chat_template import ChatTemplate
from penstock.common.text.named_templates import join_templates
from penstock.common.text.tokenizer import ModelTokenizer
from tests.support.chats import renderer_of
from tests.support.tokenizers import byte_level, write_folder

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": ["int", "null"]}}}]
MESSAGES = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
DEFAULT = (
    "\n  {{ bos_token }}\n{% set first = messages[0] %}\n{% for m in messages %}\n"
    "[{{ m.role }}]{{ m.content }}{{ first.role if loop.last }}\n{% endfor %}\n  "
)
# Macros that call themselves and each other, as in Hermes 3.
TOOL_USE = (
    "{%- macro kind(spec) %}\n{%- if spec is string %}{{ names[spec] }}\n{%- else %}"
    "{%- for each in spec %}{{ kind(each) }}{% if not loop.last %}|{% endif %}{% endfor %}"
    "{%- endif %}\n{%- endmacro %}\n"
    "{%- set names = {'int': 'integer', 'null': 'none'} %}\n"
    "{%- macro described(tool) %}{{ tool.name }}: {{ kind(tool.parameters.type) }}{% endmacro %}\n"
    "{{- bos_token }}{% set state = namespace(count=0) %}\n"
    "{% for tool in tools %}{% set tool = tool.function %}{% set state.count = loop.index %}\n"
    "  {{ described(tool) }}{% endfor %} {{ state.count }} {{ messages | length }}{{ extra }}\n\n"
)


def render(template: ChatTemplate, tools: Any, messages: Any = MESSAGES) -> str:
    return template.render(messages, TemplateOptions(tools=tools, variables={"extra": "e"}))


@pytest.mark.parametrize("tools", [None, [], TOOLS])
def test_joined_template_renders_like_the_template_of_its_name(tools: Any) -> None:
    names = {"bos_token": "<s>"}
    joined = ChatTemplate(join_templates(DEFAULT, TOOL_USE), names)
    expected = render(ChatTemplate(TOOL_USE if tools else DEFAULT, names), tools)
    assert render(joined, tools) == expected
    assert "integer|none" in expected or not tools


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "  ", "\n\n", "\n  ", "{% if true %}\n"])
@pytest.mark.parametrize("start", ["", "\n", "  ", " \n", "  {% if true %}\n", "{%- if true %}"])
def test_white_space_at_the_ends_is_kept(start: str, end: str) -> None:
    source = f"{start}{'' if '%' in start else '{% if true %}'}x{'{% endif %}'}{end}"
    source += "{% endif %}" if "%" in end else ""
    joined = ChatTemplate(join_templates(source, source), {})
    assert render(joined, None) == render(joined, TOOLS) == render(ChatTemplate(source, {}), None)


def test_joined_template_reads_the_variables_of_both() -> None:
    joined = ChatTemplate(join_templates("{{ messages }}{{ a }}", "{{ tools }}{{ b }}"), {})
    assert joined.variables == {"messages", "tools", "a", "b"}


def test_content_of_messages_has_the_form_that_both_read() -> None:
    source = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}"
    joined = ChatTemplate(join_templates(source + "{% endfor %}", source + "!{% endfor %}"), {})
    assert (render(joined, None), render(joined, TOOLS)) == ("xy", "x!y!")


def test_template_for_tools_does_not_change_the_content_of_chats_without_tools() -> None:
    default = "{% for m in messages %}{{ m.content }}{% endfor %}"
    parts = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    joined = ChatTemplate(join_templates(default, parts), {})
    assert (render(joined, None), render(joined, TOOLS)) == ("xy", "<x><y>")
    joined = ChatTemplate(join_templates(parts, default), {})
    assert (render(joined, None), render(joined, TOOLS)) == ("<x><y>", "xy")


def prompt(folder: Path, tools: Any, chat_template: str | None = None) -> str:
    renderer = renderer_of(ModelTokenizer(folder, chat_template))
    segments = renderer.render(MESSAGES, TemplateOptions(tools=tools))
    return "".join(segment.text for segment in segments)


def with_list(folder: Path) -> Path:
    write_folder(folder, byte_level())
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = [
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
        {"name": "default", "template": "default"},
        {"name": "rag", "template": "rag"},
    ]
    path.write_text(json.dumps(config))
    return folder


def test_named_template_tool_use_renders_chats_with_tools(tmp_path: Path) -> None:
    folder = with_list(tmp_path)
    assert (prompt(folder, None), prompt(folder, TOOLS)) == ("default", "tools 1")
    assert prompt(folder, TOOLS, "given") == "given"


def test_template_files_replace_the_named_templates(tmp_path: Path) -> None:
    folder = with_list(tmp_path)
    (folder / "chat_template.jinja").write_text("file")
    assert (prompt(folder, None), prompt(folder, TOOLS)) == ("file", "file")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tool file")
    assert (prompt(folder, None), prompt(folder, TOOLS)) == ("file", "tool file")


def test_model_without_a_default_template_has_no_chat_template(tmp_path: Path) -> None:
    write_folder(tmp_path, byte_level(), None)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": [{"name": "tool_use", "template": "x"}]})
    )
    assert ModelTokenizer(tmp_path).chat_template is None
