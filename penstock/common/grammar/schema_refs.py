"""Changes the references in a JSON Schema so that the schema can be put into another document."""

from collections.abc import Mapping
from typing import Any

NOT_SCHEMAS = ("const", "enum", "default", "examples")
"""Keywords whose values are not schemas."""

NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose values are mappings from names to schemas."""


def moved(schema: Any, base: str) -> Any:
    """Return a copy of `schema` in which references to the root `#` refer to `base` instead."""
    if isinstance(schema, list):
        return [moved(each, base) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            found[key] = base + value[1:]
        elif key in NAMED_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: moved(each, base) for name, each in value.items()}
        else:
            found[key] = value if key in NOT_SCHEMAS else moved(value, base)
    return found


def part(root: Any, schema: Any) -> Any:
    """Return `schema`, a part of `root`, as a complete schema with valid references.

    If `schema` has references, the result contains a copy of `root` to which they refer.
    """
    base = "#/$defs/root"
    copy = moved(schema, base)
    # If `moved` has changed nothing, `schema` has no references.
    if copy == schema or not isinstance(copy, dict):
        return schema
    return {**copy, "$defs": {**copy.get("$defs", {}), "root": moved(root, base)}}
