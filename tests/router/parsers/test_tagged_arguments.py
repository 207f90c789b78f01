"""Calls whose arguments are between tags: golden answers in every split, and types of values."""

import json
from typing import Any

import pytest

from penstock.common.schema_types import TYPES
from penstock.router.parsers.parser_names import TOOL_PARSERS
from penstock.router.parsers.tools.tool_parameters import ToolParameters, function_lines
from tests.support.parsed import Answer, check_splits
from tests.support.tokenizers import byte_level

TOKENIZER = byte_level()
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "title": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "tags": {"type": "array", "items": {"type": "string"}},
    "point": {"$ref": "#/$defs/Point"},
    "kind": {"enum": ["a", "b"]},
    "id": {"type": ["string", "integer"]},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": PROPERTIES,
                "$defs": {"Point": {"type": "object"}},
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
PARAMETERS = ToolParameters(function_lines(TOOLS))
CODE = 'def f(x):\n\treturn "é 😀" < x\\n\n'


def qwen(name: str, *arguments: tuple[str, str]) -> str:
    texts = [f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments]
    return f"<tool_call>\n<function={name}>\n{''.join(texts)}</function>\n</tool_call>"


def glm45(name: str, *arguments: tuple[str, str]) -> str:
    texts = [
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in arguments
    ]
    return f"<tool_call>{name}\n{''.join(texts)}</tool_call>"


def glm47(name: str, *arguments: tuple[str, str]) -> str:
    return glm45(name, *arguments).replace("\n<arg", "<arg").replace("\n</tool", "</tool")


def dumped(**values: Any) -> str:
    return json.dumps(values, ensure_ascii=False)


FORMS = {"qwen3_coder": qwen, "qwen3_xml": qwen, "glm45": glm45, "glm47": glm47}
TYPED = [
    # Each case has a schema type, a value as the model writes it, and the parsed argument.
    ("text", CODE, CODE),
    ("text", "", ""),
    ("text", "17", "17"),
    ("text", "null", "null"),
    ("title", "null", None),
    ("title", "nullable", "nullable"),
    ("title", "nu", "nu"),
    ("title", "Nine", "Nine"),
    ("count", "-12", -12),
    ("count", " 12 ", 12),
    ("count", "twelve", "twelve"),
    ("ratio", "1e-3", 0.001),
    ("ratio", "NaN", "NaN"),
    ("flag", "true", True),
    ("flag", "False", False),
    ("tags", '["a", "b\\n"]', ["a", "b\n"]),
    ("tags", "['a', 'b']", ["a", "b"]),
    ("point", '{"x": [1, {"y": null}]}', {"x": [1, {"y": None}]}),
    ("kind", "a", "a"),
    ("id", "17", 17),
    ("id", "17b", "17b"),
    ("id", "[17]", "[17]"),
    ("unknown", "[17]", [17]),
    ("unknown", "12:30", "12:30"),
]


@pytest.mark.parametrize(("key", "written", "value"), TYPED)
@pytest.mark.parametrize("name", FORMS)
def test_schema_decides_about_the_type_of_a_value(
    name: str, key: str, written: str, value: Any
) -> None:
    text = FORMS[name]("write", (key, written))
    found = parsed(name, text)
    assert (found.content, [each for each, _ in found.calls]) == ("", ["write"])
    arguments = json.loads(found.calls[0][1])
    assert arguments == {key: value}
    assert type(arguments[key]) is type(value)


def parsed(name: str, text: str) -> Answer:
    kind: Any = TOOL_PARSERS[name]
    return check_splits(lambda: kind(PARAMETERS), text, TOKENIZER)


BOTH = [("write", dumped(text=CODE, count=3, tags=["x"])), ("now", "{}")]
WRITE = (("text", CODE), ("count", "3"), ("tags", '["x"]'))


@pytest.mark.parametrize("name", FORMS)
def test_answer_is_the_same_in_every_split(name: str) -> None:
    form = FORMS[name]
    call, other = form("write", *WRITE), form("now")
    for text, expected in (
        ("Hello <tool> <", Answer("Hello <tool> <")),
        ("", Answer("")),
        (f"{call}{other}", Answer("", BOTH)),
        (f"I write.\n\n{call}\n{other}\n", Answer("I write.", BOTH)),
        (f"{call}\nAll is done. Yes.", Answer("All is done. Yes.", BOTH[:1])),
        (form("other.tool", ("a", "1")), Answer("", [("other.tool", '{"a": 1}')])),
        # These texts are not calls, so they stay in the content.
        ("The tag <tool_call> begins.", Answer("The tag <tool_call> begins.")),
        ("<tool_call>", Answer("<tool_call>")),
        ("<tool_call></tool_call>", Answer("<tool_call></tool_call>")),
        ('<tool_call>{"a": 1}</tool_call>', Answer('<tool_call>{"a": 1}</tool_call>')),
        (f"<tool_call>{other}", Answer("<tool_call>", BOTH[1:])),
    ):
        assert parsed(name, text) == expected, text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # Cases: answers without the outer tag, and answers that end too early.
        ("<function=now>\n</function>\n</tool_call>", Answer("", [("now", "{}")])),
        ("Use <function=other> here.", Answer("Use <function=other> here.")),
        ("<tool_call>\n<function=a b>", Answer("<tool_call>\n<function=a b>")),
        ("<tool_call>\n<function=now>\n</tool_call> x", Answer("x", [("now", "{}")])),
        (
            "<tool_call><function=f></function><function=g></function></tool_call>",
            Answer("", [("f", "{}"), ("g", "{}")]),
        ),
        (
            "<tool_call><function=f></function>\n<tool_call><function=g></function> Hi",
            Answer("Hi", [("f", "{}"), ("g", "{}")]),
        ),
        (
            "<function=write><parameter=count>\n1\n<parameter=text>\nab\n</function> Hi",
            Answer("Hi", [("write", '{"count": 1, "text": "ab"}')]),
        ),
        ("<function=write><parameter=text>\nab\n", Answer("", [("write", '{"text": "ab')])),
        ("<function=write><parameter=count>\n1", Answer("", [("write", '{"count": ')])),
        ("<function=write><parameter=a<b>1</parameter>", Answer("", [("write", "")])),
        ("<tool_call><function=wri", Answer("<tool_call><function=wri")),
    ],
)
def test_tags_that_are_missing_in_answers_of_qwen(text: str, expected: Answer) -> None:
    assert parsed("qwen3_coder", text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<tool_call>now", Answer("<tool_call>now")),
        ("<tool_call>now\n<arg_key>a", Answer("", [("now", "")])),
        ("<tool_call>now<arg_key>a</arg_key></tool_call> x", Answer("x", [("now", "{}")])),
        ("<tool_call>write<arg_key>text</arg_key><arg_value>ab</arg_v", "ab</arg_v"),
        (
            "<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value><tool_call>now</tool_call>",
            Answer("", [("now", '{"a": 1}'), ("now", "{}")]),
        ),
    ],
)
def test_tags_that_are_missing_in_answers_of_glm(text: str, expected: Answer | str) -> None:
    if isinstance(expected, str):
        expected = Answer("", [("write", f'{{"text": "{expected}')])
    assert parsed("glm45", text) == expected


def test_string_is_streamed_while_it_arrives() -> None:
    for name, form in FORMS.items():
        kind: Any = TOOL_PARSERS[name]
        for key in ("text", "title"):
            parser = kind(PARAMETERS)
            before, _, _ = form("write", (key, "Hello")).partition("llo")
            assert parser.feed(before)[-1].text.endswith("He"), name


SELF = {"$ref": "#/properties/a"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string", "minLength": 1}, {"string"}),
        ({"const": "x"}, {"string"}),
        ({"enum": [1.0, None]}, {"number", "integer", "null"}),
        ({"oneOf": [{"type": "string"}, {"type": "boolean"}]}, {"string", "boolean"}),
        ({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}, {"string"}),
        ({}, TYPES),
        (True, TYPES),
        ({"type": 5, "enum": 5, "anyOf": 5, "allOf": 5, "$ref": 5}, TYPES),
        ({"type": []}, TYPES),
        ({"enum": []}, TYPES),
        ({"$ref": "#/no/such"}, TYPES),
        ({"$ref": "other.json"}, TYPES),
        (SELF, TYPES),
        ({"anyOf": [SELF] * 9}, TYPES),
    ],
)
def test_types_of_a_parameter(schema: Any, expected: set[str]) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    found = ToolParameters(function_lines(tools))
    assert found.types_of("f", "a") == expected
    assert found.types_of("f", "b") == found.types_of("g", "a") == TYPES
