"""Each function of a chat is looked up and parsed alone."""

import json
from typing import Any

import pytest

from penstock.router.parsers.tools import tool_parameters
from penstock.router.parsers.tools.tool_parameters import ToolParameters, function_lines


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def typed(kind: str) -> dict[str, Any]:
    return {"properties": {"a": {"type": kind, "description": "one\nf {}"}}}


TOOLS = [
    tool("f", parameters=typed("string")),
    tool("ff", parameters=typed("integer")),
    tool("g"),
    tool("h", parameters=typed("null")),
]


def test_only_the_parameters_of_a_called_function_are_parsed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parsed: list[Any] = []

    class Json:
        @staticmethod
        def loads(text: bytes) -> Any:
            parsed.append(json.loads(text))
            return parsed[-1]

    parameters = ToolParameters(function_lines(TOOLS))
    monkeypatch.setattr(tool_parameters, "json", Json)
    assert parameters.types_of("ff", "a") == {"integer"}
    assert parameters.types_of("ff", "b") > {"string", "integer"}
    assert parsed == [typed("integer")]
    assert parameters.types_of("h", "a") == {"null"}
    assert parameters.types_of("f", "a") == {"string"}
    assert len(parsed) == 3


@pytest.mark.parametrize("name", ["", "x", "F", "f ", "f {", "one", "\nf", "a\nf", "{}", "\ud800"])
def test_name_that_no_tool_has(name: str) -> None:
    parameters = ToolParameters(function_lines(TOOLS))
    assert not parameters.has(name)
    assert parameters.types_of(name, "a") > {"string", "null"}
    assert all(map(parameters.has, ("f", "ff", "g", "h")))
    assert not ToolParameters().has("f")
