"""Tools of a chat in OpenAI's form, and the rules for tools that hold for every API."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from penstock.common.value_text import value_text
from penstock.router.errors import invalid
from penstock.router.requests.json_text import dumps

NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""A function's name; OpenAI's limit is lower, and excludes dots, colons and slashes."""

MAX_PARAMETER_VALUES = 10_000
"""Maximum number of JSON values in the parameters of a function; they are parsed in 3 ms."""

Mode: TypeAlias = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The checked `tool_choice` of a request.

    Attributes:
        mode: whether tools may be called. The modes are those of OpenAI's `tool_choice`; `named`
            means that the function `name` must be called.
        name: name of the function in the mode `named`, else empty.
    """

    mode: Mode
    name: str = ""


def read_tool_choice(given: object, tools: Sequence[Mapping[str, Any]]) -> ToolChoice:
    """Return the choice of a request.

    Without a choice, the model may call the tools if there are any.

    Args:
        given: the field `tool_choice`.
        tools: the checked field `tools`.

    Raises:
        ServingError: INVALID if the choice is none of OpenAI's forms, or names no tool.
    """
    match given:
        case None:
            return ToolChoice("auto" if tools else "none")
        case "none":
            return ToolChoice("none")
        case "auto":
            return ToolChoice("auto" if tools else "none")
        case "required":
            chosen = ToolChoice("required")
        case {"type": "function", "function": {"name": str(name)}}:
            chosen = ToolChoice("named", name)
        case _:
            raise invalid(
                "tool_choice must be 'none', 'auto', 'required' or "
                f'{{"type": "function", "function": {{"name": ...}}}}, not {value_text(given)}',
                "tool_choice",
            )
    if not tools:
        raise invalid(
            "tool_choice needs tools: set 'tools', or leave out tool_choice", "tool_choice"
        )
    if chosen.name and chosen.name not in {tool["function"]["name"] for tool in tools}:
        raise invalid(
            f"tool_choice names {chosen.name[:80]!r}, but no function in 'tools' has this name: "
            "send the name of one of these functions",
            "tool_choice",
        )
    return chosen


def check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuse tools that are not functions in OpenAI's form, and tools with equal names."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools.{index}"
        if tool.get("type") != "function":
            raise invalid(
                f"{where}.type must be 'function', not {value_text(tool.get('type'))}", "tools"
            )
        function = tool.get("function")
        if not isinstance(function, dict):
            raise invalid(
                f"{where}.function must be an object, not {value_text(function)}", "tools"
            )
        check_name(function.get("name"), f"{where}.function.name", names)
        _check_types(function, f"{where}.function")


def check_name(name: object, where: str, names: set[str]) -> None:
    """Refuse a name that is invalid or already in `names`; add any other name to `names`.

    Args:
        name: name of a function.
        where: path of the field in the body.
        names: names of the functions before it.
    """
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise invalid(
            f"{where} must have 1 to 128 letters, digits or characters of '_.:/-', but is "
            f"{name!r:.140}",
            "tools",
        )
    if name in names:
        raise invalid(f"{where} is {name!r}, which is also the name of another tool", "tools")
    names.add(name)


def _check_types(function: Mapping[str, Any], where: str) -> None:
    types = {"description": (str, "a string"), "strict": (bool, "a boolean")}
    for key, (kind, what) in types.items():
        if not isinstance(function.get(key), kind | None):
            given = value_text(function.get(key))
            raise invalid(f"{where}.{key} must be {what}, not {given}", "tools")
    if not isinstance(function.get("parameters"), dict | None):
        given = value_text(function.get("parameters"))
        raise invalid(f"{where}.parameters must be a JSON Schema (an object), not {given}", "tools")


def check_parameters(tools: Sequence[Mapping[str, Any]]) -> None:
    """Refuse functions whose parameters take too long to parse, because a parser must not pause."""
    for tool in tools:
        function = tool["function"]
        count = _num_values(function.get("parameters"))
        if count > MAX_PARAMETER_VALUES:
            raise invalid(
                f"the parameters of the function {function['name']!r} have {count} JSON values; at "
                f"most {MAX_PARAMETER_VALUES} are allowed",
                "tools",
            )


def _num_values(value: object) -> int:
    match value:
        case dict():
            return 1 + sum(map(_num_values, value.values()))
        case list():
            return 1 + sum(map(_num_values, value))
        case _:
            return 1


def check_json(name: str, value: object, max_bytes: int, max_depth: int | None = None) -> None:
    """Refuse a field with free JSON that is too large or too deep.

    Args:
        name: name of the field.
        value: its content.
        max_bytes: largest size as JSON.
        max_depth: maximum nesting of lists and objects, or None for the JSON parser's limit.
    """
    if not value:
        return
    if max_depth is not None and _is_deeper(value, max_depth):
        raise invalid(f"{name} is nested more than {max_depth} levels deep, the maximum", name)
    size = len(dumps(value).encode())
    if size > max_bytes:
        raise invalid(f"{name} has {size} bytes as JSON; at most {max_bytes} are allowed", name)


def _is_deeper(value: object, levels: int) -> bool:
    match value:
        case dict():
            items = value.values()
        case list():
            items = value  # type: ignore[assignment]
        case _:
            return False
    return levels == 0 or any(_is_deeper(item, levels - 1) for item in items)
