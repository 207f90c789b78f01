"""The JSON schema of answers that the client's `tool_choice` forces to be tool calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.common.grammar.schema_refs import moved
from penstock.router.requests.json_text import dumps
from penstock.router.requests.tools import ToolChoice

NO_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


def forced_schema(chosen: ToolChoice, tools: Sequence[Mapping[str, Any]], is_parallel: bool) -> str:
    """Return the schema of an answer as JSON, or an empty text if no call is forced.

    In the mode `named`, the answer consists of the arguments of the named function. In the mode
    `required`, the answer is an array of calls, `[{"name": ..., "parameters": {...}}, ...]`, as in
    vLLM.

    Args:
        chosen: the checked choice.
        tools: the checked tools.
        is_parallel: whether the array may have several calls.
    """
    functions = [tool["function"] for tool in tools]
    if chosen.mode == "named":
        (function,) = (each for each in functions if each["name"] == chosen.name)
        return dumps(function.get("parameters") or NO_PARAMETERS)
    if chosen.mode != "required":
        return ""
    calls = [_call(function, index) for index, function in enumerate(functions)]
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if not is_parallel:
        schema["maxItems"] = 1
    return dumps(schema)


def _call(function: Mapping[str, Any], index: int) -> dict[str, Any]:
    parameters = function.get("parameters") or NO_PARAMETERS
    base = f"#/items/anyOf/{index}/properties/parameters"
    return {
        "type": "object",
        "properties": {
            "name": {"const": function["name"]},
            "parameters": moved(parameters, base),
        },
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
