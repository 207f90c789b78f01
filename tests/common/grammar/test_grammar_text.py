"""Constraints become grammars; unsupported ones are refused with the keyword and its path."""

import json
from typing import Any

import pytest

from penstock.common.grammar.grammar_text import MAX_CHOICES, check_structured_outputs
from penstock.common.invalid_parameter import InvalidParameterError
from penstock.common.structured_outputs import StructuredOutputs, choice, json_schema

TAG = {"begin": "<f=a>", "schema": {"type": "object"}, "end": "</f>"}


def tag(**changed: Any) -> StructuredOutputs:
    text = json.dumps({"structures": [TAG], "triggers": ["<f="], **changed})
    return StructuredOutputs("structural_tag", text)


VALID = [
    json_schema({"type": "object", "properties": {"a": {"type": "integer"}}}),
    json_schema(True),
    StructuredOutputs("json_object"),
    StructuredOutputs("regex", r"[a-z]+@\d{2,5}"),
    choice(["yes", 'a "quoted" one', "line\nbreak", "é", "😀"]),
    StructuredOutputs("grammar", 'start: "a" b*\nb: /[0-9]/'),
    StructuredOutputs("grammar", 'root ::= "a" [0-9]+'),
    tag(),
]


@pytest.mark.parametrize("wanted", VALID, ids=lambda each: each.kind)
def test_constraint_of_each_kind_is_accepted(wanted: StructuredOutputs) -> None:
    check_structured_outputs(wanted)


def deep(keyword: str, value: Any) -> StructuredOutputs:
    """Return a schema with a keyword below a property with "/" in its name."""
    return json_schema(
        {"type": "object", "properties": {"a/b": {"type": "array", "items": {keyword: value}}}}
    )


PLACE = "/properties/a~1b/items/"
INVALID = [
    (deep("not", {}), f"at {PLACE}not: "),
    (deep("uniqueItems", True), f"at {PLACE}uniqueItems: "),
    (deep("if", {}), f"at {PLACE}if: "),
    (deep("type", "text"), f"at {PLACE}type: Invalid type: text"),
    (deep("$ref", "#/nowhere"), r"at /properties/a~1b/items/\$ref: "),
    (json_schema({"$ref": "http://other/schema"}), r"at /\$ref: "),
    (json_schema({"type": "string", "format": "colour"}), "at /format: Unknown format: colour"),
    (json_schema({"type": "string", "pattern": "(?=a)b"}), "look-around"),
    (json_schema(False), "schema is false"),
    (json_schema("[]"), "must be a JSON Schema .*, not '\\[\\]'"),
    (json_schema("{"), "cannot be parsed"),
    (json_schema({"not": {}, "x-guidance": {"lenient": True}}), "at /not: "),
    (StructuredOutputs("regex", "(a"), "unclosed group"),
    (StructuredOutputs("regex", "\ud800"), "unpaired surrogate"),
    (StructuredOutputs("choice", '["\\ud800"]'), "unpaired surrogate"),
    (choice([]), f"1 to {MAX_CHOICES} strings"),
    (choice(["a", ""]), r"choice\[1\] must be a non-empty string, not ''"),
    (StructuredOutputs("choice", '"a"'), "a JSON list of strings"),
    (StructuredOutputs("choice", "[1]"), r"choice\[0\] must be a non-empty string, not 1"),
    (StructuredOutputs("grammar", "start: b"), "unknown name"),
    (tag(structures=[]), r"structures is a list of 0 items"),
    (tag(structures=[3]), r"structural_tag.structures\[0\] must be a JSON object"),
    (tag(structures=[{**TAG, "schema": 3}]), r"structures\[0\].schema must be a JSON Schema"),
    (tag(structures=[{**TAG, "end": None}]), r"begin is .* and .*\.end is null"),
    (tag(triggers=["<g"]), "begin is '<f=a>': expected a text that starts with"),
]


@pytest.mark.parametrize(("wanted", "words"), INVALID)
def test_constraint_that_no_grammar_can_follow_is_refused_by_place(
    wanted: StructuredOutputs, words: str
) -> None:
    with pytest.raises(InvalidParameterError, match=words) as refused:
        check_structured_outputs(wanted)
    assert refused.value.param == "structured_outputs"
    assert "\n" not in str(refused.value)


BOMBS = [
    (
        json_schema(
            {"allOf": [{"type": "string", "pattern": f"^.*a.{{{i}}}$"} for i in range(20)]}
        ),
        "Unable to determine if regex is empty",
    ),
    (
        json_schema(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"{i}{j}": {}}} for j in range(8)]} for i in range(8)
                ]
            }
        ),
        "schema too large",
    ),
    (json_schema('{"properties": {"a": ' * 2000 + "{}" + "}}" * 2000), "maximum recursion depth"),
    (
        json_schema('{"properties": {"a": ' * 300 + '{"not": {}}' + "}}" * 300),
        "recursion limit exceeded",
    ),
]
"""Schemas that would take exponential time or unbounded depth, each with the limit that the error
names."""


@pytest.mark.parametrize(("bomb", "limit"), BOMBS, ids=range(len(BOMBS)))
def test_schema_bomb_is_refused_by_a_limit_that_counts(bomb: StructuredOutputs, limit: str) -> None:
    # Without the limit, the first schema has 2 ** 20 states, so this test would not end.
    with pytest.raises(InvalidParameterError, match=limit):
        check_structured_outputs(bomb)
