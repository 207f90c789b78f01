"""Finds where a JSON Schema has the keyword or value that an error message quotes."""

import json
import re
from collections.abc import Iterator
from typing import Any

_SCHEMAS = {"additionalProperties", "items", "additionalItems", "contains", "not", "if", "then"}
_SCHEMAS |= {"else", "propertyNames", "unevaluatedItems", "unevaluatedProperties"}
_LISTS = {"allOf", "anyOf", "oneOf", "prefixItems", "items"}
_MAPS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}

_QUOTED_KEY = re.compile(r'Unimplemented keys: \["([^"]+)"')
_QUOTED_VALUES = (
    re.compile(r"Unknown format: (\S+)"),
    re.compile(r"Invalid type: (\S+)"),
    re.compile(r"(?:Resource|Pointer) '([^']+)'"),
)


def first_path(text: str, message: str) -> str:
    """Return " at /path" for the first place in a schema that an error message quotes.

    Return "" if the message quotes nothing of the schema.

    Args:
        text: the schema, as valid JSON.
        message: an error message of llguidance.
    """
    try:
        return _first_path(json.loads(text), message)
    except RecursionError:  # the schema is nested too deeply for a recursive walk
        return ""


def _first_path(schema: Any, message: str) -> str:
    key = _QUOTED_KEY.search(message)
    values = [found[1] for each in _QUOTED_VALUES if (found := each.search(message))]
    for path, part in _walk("", schema):
        for name, value in part.items():
            if key is not None and name == key[1]:
                return f" at {path}/{_escaped(name)}"
            is_quoted = isinstance(value, str) and value.removeprefix("#") in values
            if is_quoted and name in ("format", "type", "$ref"):
                return f" at {path}/{_escaped(name)}"
    return ""


def _walk(path: str, schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a schema and all schemas below it, each as a pair of its JSON pointer and its value."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for name, value in schema.items():
        below = f"{path}/{_escaped(name)}"
        if name in _SCHEMAS:
            yield from _walk(below, value)
        if name in _LISTS and isinstance(value, list):
            for index, each in enumerate(value):
                yield from _walk(f"{below}/{index}", each)
        if name in _MAPS and isinstance(value, dict):
            for key, each in value.items():
                yield from _walk(f"{below}/{_escaped(key)}", each)


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
