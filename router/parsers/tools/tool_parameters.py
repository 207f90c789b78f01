"""JSON types of the parameters of tools, for formats whose values do not show their types."""

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

TYPES = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
STRING = frozenset(("string",))
MAX_SCHEMAS = 256
"""Bound on the schemas that are read for one parameter, because references may form a cycle."""


class ToolParameters:
    """The parameters of the tools of a chat.

    Args:
        tools: a JSON array of checked tools in OpenAI's form, or empty.
    """

    def __init__(self, tools: bytes = b"") -> None:
        self._tools = tools

    @cached_property
    def _schemas(self) -> Mapping[str, Any]:
        """Schema of the parameters of each function; parsed when the first call needs it."""
        tools = json.loads(self._tools) if self._tools else []
        functions = [tool["function"] for tool in tools]
        return {function["name"]: function.get("parameters") for function in functions}

    def has(self, function: str) -> bool:
        """Return whether a tool has this name."""
        return function in self._schemas

    def types_of(self, function: str, parameter: str) -> frozenset[str]:
        """Return the JSON types that a parameter may have: all types if its schema sets none."""
        root = self._schemas.get(function)
        properties = root.get("properties") if isinstance(root, dict) else None
        schema = properties.get(parameter) if isinstance(properties, dict) else None
        return _Types(root).of(schema)


class _Types:
    """Finds the types that schemas allow.

    Args:
        root: schema that references refer to.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_left = MAX_SCHEMAS

    def of(self, schema: Any) -> frozenset[str]:
        """Return the types that a schema allows; any type if the schema is not valid."""
        self._num_left -= 1
        if not isinstance(schema, dict) or self._num_left < 0:
            return TYPES
        found = _named(schema.get("type"))
        if isinstance(schema.get("enum"), list):
            found &= frozenset().union(*map(types_of_value, schema["enum"]))
        if "const" in schema:
            found &= types_of_value(schema["const"])
        if isinstance(schema.get("$ref"), str):
            found &= self.of(self._referred(schema["$ref"]))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                found &= frozenset().union(*map(self.of, schema[key]))
        if isinstance(schema.get("allOf"), list):
            found = found.intersection(*map(self.of, schema["allOf"]))
        return found or TYPES

    def _referred(self, reference: str) -> Any:
        """Return the schema of a reference such as `#/$defs/Point`; None if there is none."""
        start, *names = reference.split("/")
        found = self._root if start == "#" else None
        for name in names:
            key = name.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else None
        return found


def types_of_value(value: Any) -> frozenset[str]:
    """Return the types that a JSON value has; an integer is also a number."""
    match value:
        case None:
            return frozenset(("null",))
        case bool():
            return frozenset(("boolean",))
        case int() | float():
            is_integer = isinstance(value, int) or value.is_integer()
            return frozenset(("integer", "number") if is_integer else ("number",))
        case str():
            return STRING
        case list() | tuple():
            return frozenset(("array",))
        case _:
            return frozenset(("object",))


def _named(given: Any) -> frozenset[str]:
    """Return the types that the keyword `type` lists; all types if it is not valid."""
    names = given if isinstance(given, list) else [given]
    found = frozenset(name for name in names if isinstance(name, str)) & TYPES
    return found or TYPES
