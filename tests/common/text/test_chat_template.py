import pytest

from penstock.common.text.chat_template import ChatTemplate, ChatTemplateError

MESSAGES = [{"role": "user", "content": "<b>hé</b>"}]


def render(source: str, names: dict[str, object] | None = None) -> str:
    return ChatTemplate(source, names or {}).render(MESSAGES)


def test_names_of_special_tokens_and_the_open_end() -> None:
    source = "{{ bos_token }}{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}"
    assert render(source, {"bos_token": "<s>"}) == "<s><b>hé</b>>"


def test_blocks_leave_no_blank_lines() -> None:
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_json_is_plain() -> None:
    assert render("{{ messages[0] | tojson }}") == '{"role": "user", "content": "<b>hé</b>"}'
    assert render("{{ {'a': 1} | tojson(indent=2) }}") == '{\n  "a": 1\n}'


def test_loops_can_be_left_and_dates_asked_for() -> None:
    assert render("{% for i in range(5) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
    assert render("{{ strftime_now('%Y') }}").isdecimal()


def test_generation_marks_only_mark() -> None:
    assert render("a{% generation %}b{{ 1 }}{% endgeneration %}c") == "ab1c"


def test_the_template_may_refuse() -> None:
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
def test_what_a_template_must_not_do_is_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot render"):
        render(source)


def test_a_broken_template_is_named_when_loaded() -> None:
    with pytest.raises(ValueError, match="not valid"):
        ChatTemplate("{% if %}", {})
