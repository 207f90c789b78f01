"""Schemas of strict tools that are malformed or too large are refused, in every notation."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest

from penstock.common.argument_notation import ArgumentNotation
from penstock.common.grammar.grammar_text import check_structured_outputs, grammar_text
from penstock.common.invalid_parameter import InvalidParameterError
from penstock.common.structured_outputs import StructuredOutputs

NOTATIONS: Mapping[str, ArgumentNotation] = {
    "tagged": ArgumentNotation("tagged", '"<p="', '">"', "</p>", markers=("</p>",)),
    "bracketed": ArgumentNotation("bracketed", end="<escape>", markers=("<escape>",)),
    "keywords": ArgumentNotation("keywords"),
}


def wanted(notation: ArgumentNotation, **schema: Any) -> StructuredOutputs:
    content = {
        "notation": asdict(notation),
        "grammar": 'start: "(" arguments_0 ")"',
        "arguments": [{"type": "object", **schema}],
        "names": ["f"],
    }
    return StructuredOutputs("tool_calls", json.dumps(content))


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        found = {"type": "object", "properties": {"a": found}}
    return found


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize(
    "value",
    [
        {"type": "string", "enum": 5},
        {"type": "string", "anyOf": 5},
        {"type": "string", "pattern": 5},
        {"type": "string", "format": {}},
        {"type": "string", "maxLength": "x"},
        {"anyOf": None},
        {"type": {}},
        {"type": [{}]},
        {"type": "array", "minItems": "x"},
        {"$ref": {}},
        None,
        [],
    ],
    ids=str,
)
def test_malformed_schema_is_refused(name: str, value: Any) -> None:
    with pytest.raises(InvalidParameterError):
        check_structured_outputs(wanted(NOTATIONS[name], properties={"p": value}))


@pytest.mark.parametrize("name", NOTATIONS)
@pytest.mark.parametrize("required", [5, [{}], ["other"]], ids=str)
def test_malformed_list_of_required_arguments_is_refused(name: str, required: Any) -> None:
    schema = {"properties": {"p": {"type": "integer"}}, "required": required}
    with pytest.raises(InvalidParameterError, match=r"schema of strict tools.* f"):
        check_structured_outputs(wanted(NOTATIONS[name], **schema))


def test_schema_that_is_too_deep_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="nested too deeply"):
        grammar_text(wanted(NOTATIONS["bracketed"], properties={"p": nested(400)}))


@pytest.mark.parametrize("name", ["tagged", "bracketed"])
def test_references_that_repeat_a_schema_exponentially_often_are_refused(name: str) -> None:
    schemas: dict[str, Any] = {"s6": {"type": "string"}}
    for level in range(6):
        branches = [{"$ref": f"#/$defs/s{level + 1}"}] * 10
        schemas[f"s{level}"] = {"type": "string", "anyOf": branches}
    schema = {"properties": {"p": {"$ref": "#/$defs/s0"}}, "$defs": schemas}
    with pytest.raises(InvalidParameterError, match="more than 1000 parts of the schema"):
        grammar_text(wanted(NOTATIONS[name], **schema))


def test_rules_that_copy_the_schema_for_each_argument_are_bounded() -> None:
    arguments = {f"a{number}": {"$ref": "#/$defs/n"} for number in range(400)}
    schema = {"properties": arguments, "$defs": {"n": {"enum": [1, 2]}}}
    with pytest.raises(InvalidParameterError, match="send a smaller schema"):
        grammar_text(wanted(NOTATIONS["keywords"], **schema))


def test_reference_to_a_schema_without_values_is_refused() -> None:
    schema = {"properties": {"p": {"$ref": "#/$defs/n"}}, "$defs": {"n": False}}
    with pytest.raises(InvalidParameterError, match="allows no value"):
        grammar_text(wanted(NOTATIONS["bracketed"], **schema))


def test_lengths_may_be_integral_floats() -> None:
    text = {"type": "string", "minLength": 1.0, "maxLength": 5.0}
    check_structured_outputs(wanted(NOTATIONS["tagged"], properties={"p": text}))
