"""Tools of Anthropic's API, and the choice among them."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from penstock.common.value_text import value_text
from penstock.router.api.anthropic.blocks import CacheControl, ClosedModel
from penstock.router.api.generation.strict_model import FreeObjects, StrictModel
from penstock.router.errors import invalid
from penstock.router.requests.tools import ToolChoice, check_name


class Tool(ClosedModel):
    """A tool that the client runs."""

    type: Literal["custom"] | None = None
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    cache_control: CacheControl | None = None
    strict: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: FreeObjects | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None

    def plain(self) -> dict[str, Any]:
        """Return the tool in OpenAI's form, which chat templates read."""
        schema = self.input_schema
        if self.input_examples:
            examples = schema.get("examples")
            known = examples if isinstance(examples, list) else []
            schema = {**schema, "examples": [*known, *self.input_examples]}
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = schema
        return {"type": "function", "function": function}

    def check_fields(self, where: str) -> None:
        """Refuse unsupported values. `where` is the tool's path in the body."""
        if (kind := self.input_schema.get("type")) != "object":
            raise invalid(
                f"{where}.input_schema.type must be 'object', not {value_text(kind)}", "tools"
            )
        if self.eager_input_streaming is False:
            raise invalid(
                f"{where}.eager_input_streaming cannot be false, because inputs are always "
                "streamed as they are generated: leave it out",
                "tools",
            )
        if self.defer_loading:
            raise invalid(f"{where}.defer_loading is not supported: leave it out", "tools")
        if self.allowed_callers not in (None, ["direct"]):
            raise invalid(
                f"{where}.allowed_callers must be ['direct'], not {self.allowed_callers!r:.40}: "
                "leave it out",
                "tools",
            )


class OtherTool(StrictModel):
    """A tool that the server would have to run, or whose schema Anthropic defines."""

    type: str


def _tag(tool: Any) -> str:
    kind = tool.get("type") if isinstance(tool, dict) else getattr(tool, "type", None)
    return "<custom>" if kind in (None, "custom") else "<other>"


AnyTool: TypeAlias = Annotated[
    Annotated[Tool, Tag("<custom>")] | Annotated[OtherTool, Tag("<other>")], Discriminator(_tag)
]
Tools: TypeAlias = Annotated[list[AnyTool], Field(fail_fast=True)]

MODES: Mapping[str, Any] = {"auto": "auto", "any": "required", "tool": "named", "none": "none"}


class ToolChoiceParam(ClosedModel):
    """The field `tool_choice`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def is_forced(self) -> bool:
        """True if the answer must consist of tool calls."""
        return self.type in ("any", "tool")

    def chosen(self) -> ToolChoice:
        return ToolChoice(MODES[self.type], self.name or "")

    def check_tools(self, names: set[str]) -> None:
        """Refuse a choice that does not fit the tools with these names."""
        if (self.type == "tool") != (self.name is not None):
            rule = "requires" if self.name is None else "does not allow"
            action = "set" if self.name is None else "leave out"
            raise invalid(
                f"tool_choice.type {self.type!r} {rule} tool_choice.name: {action} this field",
                "tool_choice",
            )
        if self.type == "none" and self.disable_parallel_tool_use is not None:
            name = "tool_choice.disable_parallel_tool_use"
            raise invalid(
                f"tool_choice.type 'none' does not allow {name}: leave it out", "tool_choice"
            )
        if self.is_forced and not names:
            raise invalid(
                f"tool_choice.type {self.type!r} needs tools: set 'tools', or leave out "
                "tool_choice",
                "tool_choice",
            )
        if self.name is not None and self.name not in names:
            raise invalid(
                f"tool_choice.name is {self.name[:80]!r}, but no tool in 'tools' has this name: "
                "send the name of one of these tools",
                "tool_choice",
            )


def check_tools(tools: Sequence[Any], choice: ToolChoiceParam | None) -> None:
    """Refuse unsupported tools, tools of equal name, and a choice that does not fit the tools."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        where = f"tools.{index}"
        if not isinstance(tool, Tool):
            raise invalid(
                f"{where}.type {tool.type[:40]!r} is not supported: expected 'custom'",
                "tools",
            )
        check_name(tool.name, f"{where}.name", names)
        tool.check_fields(where)
    if choice is not None:
        choice.check_tools(names)
