import pytest

from penstock.common.text.chat_source import ChatTemplateError
from penstock.common.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "<b>hé</b>"}]


def render(source: str, special_tokens: dict[str, object] | None = None) -> str:
    return ChatTemplate(source, special_tokens or {}).render(MESSAGES)


def test_special_tokens_and_generation_prompt_are_rendered() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    assert render(source, {"bos_token": "<s>"}) == "<s><b>hé</b>>"


def test_template_blocks_leave_no_blank_lines() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_tojson_escapes_neither_html_nor_non_ascii() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "<b>hé</b>"}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_tojson_has_the_arguments_of_transformers() -> None:
    source = "{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, separators=(',', ':'), %s) }}"
    assert render(source % "sort_keys=True") == '{"a":1,"b":"\\u00e9"}'
    assert render(source % "indent=none") == '{"b":"\\u00e9","a":1}'


def test_break_and_strftime_now_are_supported() -> None:
    assert render("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
    assert render("{{ strftime_now('%Y') }}").isdecimal()


def test_generation_tags_do_not_change_the_text() -> None:
    assert render("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"


def test_raise_exception_in_a_template_is_reported() -> None:
    with pytest.raises(ChatTemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ nothing.at.all }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_unsafe_or_failing_template_raises_chat_template_error(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot render"):
        render(source)


def test_template_syntax_error_is_raised_on_loading() -> None:
    with pytest.raises(ValueError, match="not valid"):
        ChatTemplate("{% if %}", {})
