"""JSON types of the parameters of tools, for formats whose values do not show their types."""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from penstock.common.schema_types import parameter_types


class ToolParameters:
    """The parameters of the tools of a chat.

    Args:
        tools: a JSON array of checked tools in OpenAI's form, or empty.
    """

    def __init__(self, tools: bytes = b"") -> None:
        self._tools = tools

    @cached_property
    def _schemas(self) -> Mapping[str, Any]:
        """Schema of the parameters of each function.

        The schemas are parsed when the first call needs them.
        """
        tools = json.loads(self._tools) if self._tools else []
        functions = [tool["function"] for tool in tools]
        return {function["name"]: function.get("parameters") for function in functions}

    def has(self, function: str) -> bool:
        """Return whether a tool has this name."""
        return function in self._schemas

    def types_of(self, function: str, parameter: str) -> frozenset[str]:
        """Return the JSON types that a parameter may have; all types if the schema sets none."""
        return parameter_types(self._schemas.get(function), parameter)
