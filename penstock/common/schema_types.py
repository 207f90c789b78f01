"""Finds the JSON types that a JSON Schema allows.

Some formats of tool calls write values without showing their types. The parsers and the grammars of
these formats therefore need the types that the schema allows.
"""

from collections.abc import Mapping
from typing import Any

TYPES = frozenset(("string", "integer", "number", "boolean", "null", "array", "object"))
STRING = frozenset(("string",))
TEXT_OR_NULL = frozenset(("string", "null"))
MAX_SCHEMAS = 256
"""Limit of the schemas that are read for one value. It ends cycles of references."""


def types_of(root: Any, schema: Any) -> frozenset[str]:
    """Return the JSON types that a schema allows.

    All types are returned if the schema sets no type or is not valid.

    Args:
        root: schema that contains the targets of references.
        schema: the schema.
    """
    return _Types(root).of(schema)


def parameter_types(root: Any, parameter: str) -> frozenset[str]:
    """Return the JSON types that a schema of arguments allows for one parameter.

    Args:
        root: schema of the object that has the parameters as its members.
        parameter: name of the parameter.
    """
    return types_of(root, properties_of(root).get(parameter))


def properties_of(root: Any) -> Mapping[str, Any]:
    """Return the `properties` of an object's schema, or {} if they are missing or malformed."""
    schema = target(root, root)
    found = schema.get("properties") if isinstance(schema, dict) else None
    return found if isinstance(found, dict) else {}


def target(root: Any, schema: Any) -> Any:
    """Follow a chain of `$ref` keywords and return the schema at its end.

    Return None if a reference is broken or the chain is endless.

    Args:
        root: schema that contains the targets of references.
        schema: the schema at the start of the chain.
    """
    for _ in range(MAX_SCHEMAS):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        schema = referred(root, schema["$ref"])
    return None


def referred(root: Any, reference: str) -> Any:
    """Return the target of a reference such as `#/$defs/Point`, or None if it does not exist."""
    start, *names = reference.split("/")
    found = root if start == "#" else None
    for name in names:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found


def types_of_value(value: Any) -> frozenset[str]:
    """Return the JSON types that a value has. An integer is also a number."""
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


def named_types(given: Any) -> frozenset[str]:
    """Return the types that the keyword `type` lists, or all types if its value is not valid."""
    names = given if isinstance(given, list) else [given]
    found = frozenset(name for name in names if isinstance(name, str)) & TYPES
    return found or TYPES


class _Types:
    """Finds the types that schemas allow.

    Args:
        root: schema that contains the targets of references.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._num_left = MAX_SCHEMAS

    def of(self, schema: Any) -> frozenset[str]:
        """Return the types that a schema allows, or all types if the schema is not valid."""
        self._num_left -= 1
        if not isinstance(schema, dict) or self._num_left < 0:
            return TYPES
        found = named_types(schema.get("type"))
        if isinstance(schema.get("enum"), list):
            found &= frozenset().union(*map(types_of_value, schema["enum"]))
        if "const" in schema:
            found &= types_of_value(schema["const"])
        if isinstance(schema.get("$ref"), str):
            found &= self.of(referred(self._root, schema["$ref"]))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                found &= frozenset().union(*map(self.of, schema[key]))
        if isinstance(schema.get("allOf"), list):
            found = found.intersection(*map(self.of, schema["allOf"]))
        return found or TYPES
