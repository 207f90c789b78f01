"""Strict calls of formats whose arguments are not a JSON object: golden and random calls."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.common.grammar.matcher import num_words
from penstock.common.invalid_parameter import InvalidParameterError
from penstock.router.parsers.parser_names import new_tool_parser
from penstock.router.parsers.tools.tool_parameters import ToolParameters, function_lines
from tests.support.json_schemas import SCHEMAS
from tests.support.parsed import answer_of, check_splits, parse
from tests.support.strict_model import END, Model

MAX_TOKENS = 300
RELAXED = settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


@dataclass(frozen=True)
class Format:
    """A format: `write` returns the text of a call; `ends` are texts that end a value or a call."""

    write: Callable[[str, Mapping[str, Any]], str]
    ends: Sequence[str]
    is_special: bool = True
    prompt: str = "hello"
    stop: str = "f"


def dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def raw(value: Any) -> str:
    return value if isinstance(value, str) else dumped(value)


def qwen(name: str, values: Mapping[str, Any]) -> str:
    texts = [f"\n<parameter={key}>\n{raw(value)}\n</parameter>" for key, value in values.items()]
    return f"<tool_call>\n<function={name}>{''.join(texts)}\n</function>\n</tool_call>"


def glm(name: str, values: Mapping[str, Any]) -> str:
    texts = [
        f"\n<arg_key>{key}</arg_key>\n<arg_value>{raw(value)}</arg_value>"
        for key, value in values.items()
    ]
    return f"<tool_call>{name}{''.join(texts)}\n</tool_call>"


def bracketed(value: Any, quote: str) -> str:
    match value:
        case str():
            return f"{quote}{value}{quote}"
        case list():
            return f"[{','.join(bracketed(each, quote) for each in value)}]"
        case dict():
            texts = []
            for name, each in value.items():
                key = name if name.isalnum() else f"{quote}{name}{quote}"
                texts.append(f"{key}:{bracketed(each, quote)}")
            return "{" + ",".join(texts) + "}"
    return dumped(value)


def gemma(name: str, values: Mapping[str, Any]) -> str:
    arguments = bracketed(values, "<escape>")
    return f"<start_function_call>call:{name}{arguments}<end_function_call>"


def gemma4(name: str, values: Mapping[str, Any]) -> str:
    quote = '<|"|>'
    return f"<|tool_call>call:{name}{bracketed(values, quote)}<tool_call|>"


def pythonic(name: str, values: Mapping[str, Any]) -> str:
    return f"[{name}({', '.join(f'{key}={dumped(each)}' for key, each in values.items())})]"


def harmony(name: str, values: Mapping[str, Any]) -> str:
    head = f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
    return f"{head}{dumped(values)}<|call|>"


FORMATS: Mapping[str, Format] = {
    "qwen3_coder": Format(
        qwen, ["\n</parameter>", "\n</function>\n</tool_call>"], is_special=False, stop="f>"
    ),
    "glm45": Format(glm, ["</arg_value>", "\n</tool_call>"], is_special=False),
    "glm47": Format(glm, ["</arg_value>", "</tool_call>"]),
    "functiongemma": Format(gemma, ["<escape>", "}<end_function_call>"], stop="call:"),
    "gemma4": Format(gemma4, ['<|"|>', "}<tool_call|>"], is_special=False, stop="call:"),
    "pythonic": Format(pythonic, ['"', ")]"], is_special=False, stop="a="),
    "llama4_pythonic": Format(pythonic, ['"', ")]"], stop="a="),
    "openai": Format(harmony, ['"', "<|call|>"], prompt="<|start|>assistant", stop="{"),
}
PLAIN = [name for name in FORMATS if name != "openai"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Model]:
    return {
        name: Model(tmp_path_factory.mktemp(name), name, each.is_special)
        for name, each in FORMATS.items()
    }


def parameters_of(name: str, functions: Sequence[Mapping[str, Any]]) -> ToolParameters:
    tools = [{"type": "function", "function": each} for each in functions]
    return ToolParameters(function_lines(tools))


def function_of(parameters: Any) -> Mapping[str, Any]:
    return {"name": "f", "parameters": parameters, "strict": True}


def is_accepted(models: Mapping[str, Model], name: str, text: str, parameters: Any) -> bool:
    functions = [function_of(parameters)]
    return models[name].accepted(text, FORMATS[name].prompt, functions) == text


def parsed(name: str, text: str, parameters: Any) -> list[tuple[str, Any]]:
    tools = parameters_of(name, [function_of(parameters)])
    answer = answer_of(parse(new_tool_parser(name, tools, is_strict=True), [text]))
    return [(called, json.loads(arguments)) for called, arguments in answer.calls]


def is_valid(value: Any, schema: Any) -> bool:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    return bool(jsonschema.Draft202012Validator(schema, format_checker=checker).is_valid(value))


# ---------------------------------------------------------------- golden calls

GOLDEN: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "day": {"type": "string", "format": "date"},
        "unit": {"enum": ["C", "F", None]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer", "minimum": 1},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "point": {"$ref": "#/$defs/point"},
    },
    "required": ["city", "count"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "next": {"$ref": "#/$defs/point"}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
GOOD: Sequence[Any] = [
    {"city": "Köln", "count": 2},
    {"city": "", "unit": "F", "count": 1, "point": {"x": 0.5, "next": {"x": -1}}},
    {"city": "a\nb <x> {", "day": "2024-02-28", "note": "x, y", "count": 7, "tags": ["a", "b"]},
    {"city": "x", "unit": None, "note": None, "count": 12, "tags": []},
]
BAD: Sequence[Any] = [
    {"count": 2},
    {"city": "x" * 21, "count": 2},
    {"city": "x", "day": "2024-13-01", "count": 2},
    {"city": "x", "unit": "K", "count": 2},
    {"city": "x", "count": 0},
    {"city": "x", "count": "many"},
    {"city": "x", "count": 1, "tags": ["a", "b", "c"]},
    {"city": "x", "count": 1, "tags": [1]},
    {"city": "x", "count": 1, "point": {"x": 1, "y": 2}},
    {"city": "x", "count": 1, "point": {"x": 1, "next": {}}},
    {"city": "x", "count": 1, "other": 2},
]


@pytest.mark.parametrize("name", FORMATS)
def test_golden_calls_are_accepted_and_parsed_in_every_split(
    models: Mapping[str, Model], name: str
) -> None:
    for values in GOOD:
        text = FORMATS[name].write("f", values)
        assert is_accepted(models, name, text, GOLDEN)
        tools = parameters_of(name, [function_of(GOLDEN)])
        make = lambda tools=tools: new_tool_parser(name, tools, is_strict=True)  # noqa: E731
        ((called, arguments),) = check_splits(make, text, models[name].tokenizer.tokenizer).calls
        assert (called, json.loads(arguments)) == ("f", values)


@pytest.mark.parametrize("name", FORMATS)
def test_wrong_arguments_and_names_are_refused(models: Mapping[str, Model], name: str) -> None:
    for values in BAD:
        assert not is_accepted(models, name, FORMATS[name].write("f", values), GOLDEN), values
    assert not is_accepted(models, name, FORMATS[name].write("g", GOOD[0]), GOLDEN) or (
        # At the start of an answer, these two formats take such a text as content.
        name in ("pythonic", "llama4_pythonic") and not parsed(name, pythonic("g", GOOD[0]), GOLDEN)
    )


@pytest.mark.parametrize("name", PLAIN)
def test_functions_that_are_not_strict_take_any_arguments(
    models: Mapping[str, Model], name: str
) -> None:
    functions = [function_of(GOLDEN), {"name": "see", "parameters": {"type": "object"}}]
    for values in ({}, {"x": 'a"b', "y": [1, {"z": "w"}], "v": 1.5}):
        text = FORMATS[name].write("see", values)
        assert models[name].accepted(text, FORMATS[name].prompt, functions) == text


@pytest.mark.parametrize("name", ["pythonic", "llama4_pythonic"])
@pytest.mark.parametrize("begin", ["[ ", "[\n", "Sure: [", "\n [\t"])
def test_text_that_the_grammar_leaves_free_is_no_call(
    models: Mapping[str, Model], name: str, begin: str
) -> None:
    text = begin + "f(city=1)]"
    assert is_accepted(models, name, text, GOLDEN)
    tools = parameters_of(name, [function_of(GOLDEN)])
    make = lambda: new_tool_parser(name, tools, is_strict=True)  # noqa: E731
    answer = check_splits(make, text, models[name].tokenizer.tokenizer)
    assert not answer.calls
    assert answer.content == text


# ---------------------------------------------------------------- random calls

PARAMETERS = st.dictionaries(
    st.sampled_from(("a", "id", "name", "value")), SCHEMAS, min_size=1, max_size=4
).flatmap(
    lambda each: st.sets(st.sampled_from(sorted(each))).map(
        lambda required: {
            "type": "object",
            "properties": each,
            "required": sorted(required),
            "additionalProperties": False,
            "$defs": {"shared": {"type": "string", "pattern": "^[k-m]{1,3}$"}},
        }
    )
)


def random_call(model: Model, name: str, parameters: Any, numbers: random.Random) -> str | None:
    """Return the text of a random call that the grammar allows, or None if it does not end."""
    form = FORMATS[name]
    matcher = model.matcher(form.prompt, [function_of(parameters)])
    encode = model.tokenizer.tokenizer.encode
    head = form.write("f", {"a": "\0"}).partition(form.stop)[0]
    ends = [encode(end, add_special_tokens=False).ids for end in form.ends]
    tokens = list(encode(head, add_special_tokens=False).ids)
    assert matcher.advance(tokens)
    words = np.zeros(num_words(model.vocabulary.tokens.vocab_size), np.int32)
    while len(tokens) < MAX_TOKENS:
        matcher.fill(words)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
        assert allowed, model.decoded(tokens)
        if END in allowed:
            return model.decoded(tokens)
        following = [numbers.choice(allowed)]
        for end in ends:
            if numbers.random() < 0.4 and matcher.inner.validate_tokens(end) == len(end):
                following = end
        assert matcher.advance(following)
        tokens += following
    return None


@pytest.mark.parametrize("name", FORMATS)
@RELAXED
@given(parameters=PARAMETERS, seed=st.integers(0, 99))
def test_random_calls_fit_the_schema(
    models: Mapping[str, Model], name: str, parameters: Any, seed: int
) -> None:
    try:
        text = random_call(models[name], name, parameters, random.Random(seed))
    except InvalidParameterError as error:
        if "Unsatisfiable" not in str(error) and " at /" not in str(error):
            raise
        return
    if text is not None:
        calls = parsed(name, text, parameters)
        assert calls
        for called, values in calls:
            assert called == "f"
            assert is_valid(values, parameters), text


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("ab1 é\n", max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("a", "id")), inner)
    ),
    max_leaves=4,
)
TYPED: st.SearchStrategy[tuple[Any, Any]] = VALUES.flatmap(
    lambda value: st.sampled_from(
        (
            (value, {"const": value}),
            (value, {"enum": [value, 5, "b"]}),
            (value, {}),
            (value, schema_of(value)),
            (value, {"anyOf": [schema_of(value), {"type": "integer", "minimum": 100}]}),
        )
    )
)


def schema_of(value: Any) -> Any:
    """Return a schema that allows this value and similar values."""
    match value:
        case None:
            return {"type": "null"}
        case bool():
            return {"type": "boolean"}
        case int():
            return {"type": "integer", "minimum": value, "maximum": value + 1}
        case str():
            return {"type": "string", "minLength": len(value), "maxLength": len(value)}
        case list():
            items = {"anyOf": [schema_of(each) for each in value]} if value else {}
            return {"type": "array", "items": items, "minItems": len(value)}
    return {
        "type": "object",
        "properties": {key: schema_of(each) for key, each in value.items()},
        "required": list(value),
    }


def as_text(name: str, value: Any, schema: Any) -> Any:
    """Return a value as the format writes it: strings as JSON if the schema allows other types."""
    if name in ("qwen3_coder", "glm45", "glm47") and isinstance(value, str):
        tools = parameters_of(name, [function_of({"properties": {"a": schema}})])
        if not tools.types_of("f", "a") <= {"string", "null"}:
            return dumped(value)
    return value


@pytest.mark.parametrize("name", FORMATS)
@RELAXED
@given(pair=TYPED)
def test_values_of_a_schema_are_accepted_and_parsed_to_equal_values(
    models: Mapping[str, Model], name: str, pair: tuple[Any, Any]
) -> None:
    value, schema = pair
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    text = FORMATS[name].write("f", {"a": as_text(name, value, schema)})
    assert is_accepted(models, name, text, parameters), text
    assert parsed(name, text, parameters) == [("f", {"a": value})]


@pytest.mark.parametrize("name", FORMATS)
@RELAXED
@given(value=VALUES, pair=TYPED)
def test_accepted_values_are_valid(
    models: Mapping[str, Model], name: str, value: Any, pair: tuple[Any, Any]
) -> None:
    parameters = {"type": "object", "properties": {"a": pair[1]}, "required": ["a"]}
    text = FORMATS[name].write("f", {"a": value})
    if is_accepted(models, name, text, parameters):
        ((_, values),) = parsed(name, text, parameters)
        assert is_valid(values, parameters), text
