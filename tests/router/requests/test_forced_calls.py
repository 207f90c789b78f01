"""Schemas of answers that must be tool calls accept exactly the calls of the tools."""

from pathlib import Path
from typing import Any

import pytest

from penstock.common.grammar.matcher import GrammarVocabulary
from penstock.common.structured_outputs import StructuredOutputs
from penstock.common.text.tokenizer import ModelTokenizer
from penstock.router.requests.forced_calls import forced_schema
from penstock.router.requests.tools import ToolChoice

TOKENIZER = ModelTokenizer(Path(__file__).parents[3] / "penstock" / "models" / "demo")
VOCABULARY = GrammarVocabulary(TOKENIZER, 2048, [2])


def function(name: str, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TREE = {
    "type": "object",
    "properties": {"next": {"$ref": "#"}, "$ref": {"$ref": "#/$defs/word"}},
    "required": ["$ref"],
    "additionalProperties": False,
    "$defs": {"word": {"enum": ["x", {"$ref": "#/kept"}]}},
}
TOOLS = [function("now"), function("add", parameters=NUMBER), function("tree", parameters=TREE)]


def accepts(text: str, mode: Any, name: str = "", is_parallel: bool = True) -> bool:
    """Return whether a forced answer may consist of `text` and then end."""
    schema = forced_schema(ToolChoice(mode, name), TOOLS, is_parallel)
    matcher = VOCABULARY.compile(StructuredOutputs("json", schema)).matcher()
    return matcher.advance([*TOKENIZER.encode(text, add_special_tokens=False), 2])


NOW = '{"name": "now", "parameters": {}}'
ADD = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"[{NOW}]", True),
        (f"[{ADD}, {NOW}]", True),
        ('[{"name": "tree", "parameters": {"next": {"$ref": "x"}, "$ref": "x"}}]', True),
        ('[{"name": "tree", "parameters": {"$ref": {"$ref": "#/kept"}}}]', True),
        ('[{"name": "tree", "parameters": {"$ref": "y"}}]', False),
        ('[{"name": "tree", "parameters": {"next": {}, "$ref": "x"}}]', False),
        ("[]", False),
        (NOW, False),
        ('[{"name": "add", "parameters": {"a": "1"}}]', False),
        ('[{"name": "now", "parameters": {"a": 1}}]', False),
        ('[{"name": "other", "parameters": {}}]', False),
        ('[{"name": "now"}]', False),
        ("hello", False),
    ],
)
def test_required_calls_fit_the_tools(text: str, expected: bool) -> None:
    assert accepts(text, "required") == expected


def test_calls_that_are_not_parallel_are_one() -> None:
    assert accepts(f"[{ADD}]", "required", is_parallel=False)
    assert not accepts(f"[{ADD}, {NOW}]", "required", is_parallel=False)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("add", '{"a": 17}', True),
        ("add", "{}", False),
        ("now", "{}", True),
        ("now", '{"a": 1}', False),
        ("tree", '{"$ref": "x"}', True),
    ],
)
def test_named_call_is_its_arguments(name: str, text: str, expected: bool) -> None:
    assert accepts(text, "named", name) == expected


@pytest.mark.parametrize("mode", ["none", "auto"])
def test_without_a_forced_call_there_is_no_schema(mode: Any) -> None:
    assert forced_schema(ToolChoice(mode), TOOLS, True) == ""
