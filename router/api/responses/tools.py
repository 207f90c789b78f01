"""Tools of the Responses API, whose members are not nested as in chat completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.common.value_text import value_text
from penstock.router.errors import ServingError, invalid
from penstock.router.requests.tools import ToolChoice, check_tools, read_tool_choice

FIELD = "tool_choice"
EXPECTED = (
    "'none', 'auto', 'required', "
    '{"type": "function", "name": ...} or '
    '{"type": "allowed_tools", "mode": "auto" or "required", "tools": [...]}'
)
"""The forms of `tool_choice`, for error messages."""

DEFAULTS: Mapping[str, Sequence[Any]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}
"""Unsupported members of tools, each with the values that mean the same as no value."""

MEMBERS = ("name", "description", "parameters", "strict")


def chat_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return checked tools in the form of chat completions.

    Raises:
        ServingError: INVALID if a tool is not a function, or is not valid.
    """
    found = [_chat_tool(tool, f"tools.{index}") for index, tool in enumerate(tools)]
    try:
        check_tools(found)
    except ServingError as error:
        raise invalid(error.message.replace(".function.", "."), error.param) from error
    return found


def _chat_tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        what = f"of type {kind[:40]!r}" if isinstance(kind, str) else "without a type"
        raise invalid(
            f"{where}: a tool {what} is not supported: expected the type 'function'", "tools"
        )
    for name, permitted in DEFAULTS.items():
        value = tool.get(name)
        if value is not None and not any(value == one for one in permitted):
            raise invalid(f"{where}.{name} is not supported: leave it out", "tools")
    function = {name: tool[name] for name in MEMBERS if tool.get(name) is not None}
    return {"type": "function", "function": function}


class ChosenTools:
    """The tools that an answer may call, and those that it must call.

    Args:
        given: the field `tool_choice`.
        tools: the checked tools, in the form of chat completions.

    Attributes:
        tools: the tools that may be called; a choice of `allowed_tools` leaves out the others.
        choice: the choice among these tools.

    Raises:
        ServingError: INVALID if the choice is not valid, or names no tool.
    """

    def __init__(self, given: object, tools: Sequence[Mapping[str, Any]]) -> None:
        self.tools = tools
        match given:
            case {"type": "function", "name": str(name)}:
                given = {"type": "function", "function": {"name": name}}
            case {
                "type": "allowed_tools",
                "mode": "auto" | "required" as mode,
                "tools": list(some),
            }:
                self.tools, given = _allowed(some, tools), mode
            case {"type": str(kind)}:
                what = (
                    "is not valid" if kind in ("function", "allowed_tools") else "is not supported"
                )
                raise invalid(
                    f"tool_choice of type {kind[:40]!r} {what}: expected {EXPECTED}", FIELD
                )
            case None | "none" | "auto" | "required":
                pass
            case _:
                raise invalid(f"tool_choice is {value_text(given)}: expected {EXPECTED}", FIELD)
        self.choice: ToolChoice = read_tool_choice(given, self.tools)


def _allowed(
    given: Sequence[object], tools: Sequence[Mapping[str, Any]]
) -> Sequence[Mapping[str, Any]]:
    """Return the tools that a list of allowed tools names."""
    known = {tool["function"]["name"] for tool in tools}
    names = set()
    for index, one in enumerate(given):
        match one:
            case {"type": "function", "name": str(name)} if name in known:
                names.add(name)
            case _:
                given_name = one.get("name") if isinstance(one, dict) else one
                raise invalid(
                    f'tool_choice.tools.{index} must be {{"type": "function", "name": ...}} with '
                    f"the name of a function in 'tools', not {value_text(given_name)}",
                    FIELD,
                )
    return [tool for tool in tools if tool["function"]["name"] in names]


def shown_tools(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert tools from the form of chat completions to the form of a response."""
    shown = []
    for tool in tools:
        function = tool["function"]
        members = {name: function.get(name) for name in MEMBERS}
        shown.append({"type": "function", **members})
    return shown
