"""Messages with tool calls and reasoning, in the forms that chat templates read."""

from typing import Any

import pytest

from penstock.common.text.chat_renderer import ChatRenderer
from penstock.common.text.chat_source import ChatSource, TemplateOptions
from penstock.common.text.chat_template import ChatTemplate


def call(arguments: str, name: str = "f") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": "call_1", "type": "function", "function": function}


def called(arguments: str, content: str | None = None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": [call(arguments)], **more}


def render(template: str, *messages: dict[str, Any], **options: Any) -> str:
    renderer = ChatRenderer(ChatSource(template, {}, ("<|im_start|>", "<|im_end|>")))
    return "".join(text for text, _ in renderer.render(messages, TemplateOptions(**options)))


CALL = "{% for m in messages %}{% for c in m.tool_calls %}"
END = "{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("{{ c.function.arguments | tojson }}", '{"a": 1, "b": "é"}'),
        ("{{ c.function | tojson }}", '{"name": "f", "arguments": {"a": 1, "b": "é"}}'),
        ("{{ c.function.arguments }}", '{"a": 1, "b": "é"}'),
        ("{{ 'x' + c.function.arguments + 'y' }}", 'x{"a": 1, "b": "é"}y'),
        ("{{ 'x' ~ c['function']['arguments'] ~ 'y' }}", 'x{"a": 1, "b": "é"}y'),
        ("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}", "a=1;b=é;"),
        ("{{ c.function.arguments is mapping }}", "True"),
        ("{{ c.function.arguments is string }}", "False"),
        ("{{ c.id }} {{ c.function.name }}", "call_1 f"),
    ],
)
def test_arguments_are_a_mapping_and_a_text(body: str, expected: str) -> None:
    assert render(CALL + body + END, called('{"a":1,"b":"\\u00e9"}')) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "{}"),
        (" \n", "{}"),
        ('{"a": ', '"{\\"a\\": "'),
        ("[1]", '"[1]"'),
        ("[" * 5000, '"' + "[" * 5000 + '"'),
    ],
)
def test_arguments_that_are_no_object_stay_a_text(arguments: str, expected: str) -> None:
    template = CALL + "{{ c.function.arguments | tojson }}" + END
    assert render(template, called(arguments)) == expected


@pytest.mark.parametrize(
    "arguments", ['{"q": "<|im_start|>"}', '{"q": "\\u003c|im_start|\\u003e"}']
)
def test_arguments_cannot_write_control_tokens_with_json_escapes(arguments: str) -> None:
    source = ChatSource(CALL + "{{ c.function.arguments | tojson }}" + END, {}, ("<|im_start|>",))
    segments = ChatRenderer(source).render([called(arguments)])
    assert "".join(text for text, _ in segments) == '{"q": "<|im_start|>"}'
    assert all(is_plain for text, is_plain in segments if "<|im_start|>" in text)


def test_tools_and_documents_cannot_write_control_tokens() -> None:
    source = ChatSource("{{ tools | tojson }}{{ documents | tojson }}", {}, ("<|im_end|>",))
    options = TemplateOptions(tools=[{"a": "<|im_end|>"}], documents=[{"<|im_end|>": 1}])
    segments = ChatRenderer(source).render([{"role": "user", "content": "x"}], options)
    assert "".join(text for text, _ in segments) == '[{"a": "<|im_end|>"}][{"<|im_end|>": 1}]'
    assert all(is_plain for text, is_plain in segments if "<|im_end|>" in text)


def test_missing_content_is_none_only_for_templates_that_test_for_it() -> None:
    plain = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    assert render(plain, called("{}")) == "[]"
    tested = "{% for m in messages %}{% if m['content'] is none %}none{% endif %}{% endfor %}"
    assert render(tested, called("{}")) == "none"
    other = "{% for m in messages %}{% if m.name is none %}{% endif %}[{{ m.content }}]{% endfor %}"
    assert render(other, called("{}")) == "[]"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_the_name_that_the_template_reads(name: str) -> None:
    message = {"role": "assistant", "content": "x", "reasoning_content": "why"}
    for read in (f"m.{name}", f"m['{name}']"):
        template = "{% for m in messages %}{{ " + read + " }}{% endfor %}"
        assert render(template, message) == "why"


def test_reasoning_has_no_names_that_the_template_does_not_read() -> None:
    message = {"role": "assistant", "content": "x", "reasoning_content": "why"}
    template = "{% for m in messages %}{{ m | length }}{{ m.thinking }}{% endfor %}"
    # The message has four keys: role, content, reasoning_content and thinking.
    assert render(template, message) == "4why"


def test_template_gets_tools_names_and_results() -> None:
    template = (
        "{{ tools | tojson }}{{ documents | length }}{% for m in messages %}"
        "[{{ m.role }}:{{ m.name }}:{{ m.tool_call_id }}:{{ m.content }}]{% endfor %}"
    )
    result = {"role": "tool", "content": "4", "tool_call_id": "call_1", "name": "f"}
    options: dict[str, Any] = {"tools": [{"type": "function"}], "documents": [{"text": "d"}]}
    found = render(template, called("{}"), result, **options)
    assert found == '[{"type": "function"}]1[assistant:::][tool:f:call_1:4]'


def test_tools_are_none_without_tools() -> None:
    template = ChatTemplate("{{ tools is none }} {{ documents is none }}", {})
    assert template.render([{"role": "user", "content": "x"}]) == "True True"


def test_begun_answer_after_tool_calls_can_be_continued() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %} end"
    assert render(template, called("{}"), continue_final_message=True) == ""
