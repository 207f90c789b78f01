"""Grammar terminals for strings that are written without JSON's quotes and escapes."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.common.grammar.string_pattern import terminal
from penstock.common.grammar.unsupported import UnsupportedSchemaError, escaped
from penstock.common.schema_types import named_types, referred, types_of
from penstock.common.value_text import value_text

ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *("$comment", "$schema", "$id", "$defs", "definitions"),
    )
)
"""Keywords of a schema that do not restrict its values."""

COMBINED = frozenset(("type", "enum", "const", "$ref", "anyOf", "oneOf", "allOf"))
STRINGS = frozenset(("minLength", "maxLength", "pattern", "format"))
NUMBERS = frozenset(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"))
ARRAYS = frozenset(("items", "minItems", "maxItems"))
OBJECTS = frozenset(("properties", "required", "additionalProperties"))
KNOWN = ANNOTATIONS | COMBINED | STRINGS | NUMBERS | ARRAYS | OBJECTS
"""Keywords that are supported for values that are not written as JSON."""

MAX_DEPTH = 32
# Limit of the schemas that are read for one function. Without it, nested references could repeat a
# schema exponentially often.
MAX_SCHEMAS = 1000

_DAY = (
    r"((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)"
    r"|02-(0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = rf"[12][0-9]{{3}}-{_DAY}"
_ZONE = r"(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
_TIME = rf"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{{1,6}})?{_ZONE}"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
FORMATS: Mapping[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": rf"{_DATE}T{_TIME}",
    "uuid": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
}
"""Patterns of the formats that are supported for strings without quotes.

Every match of a pattern is valid in its format.
"""


class RawStrings:
    """Writes Lark terminals for the strings that schemas allow.

    Args:
        root: schema that contains the targets of `$ref` keywords.
        markers: texts that no string may contain.
    """

    def __init__(self, root: Any, markers: Sequence[str]) -> None:
        self._root = root
        self._markers = markers
        self._num_visited = 0
        choices = " | ".join(quoted(each) for each in markers)
        self.any = f"/(?s:.*)/ & ~( /(?s:.*)/ ( {choices} ) /(?s:.*)/ )"

    def terminal(self, schema: Any, path: str) -> str:
        """Return the terminal of the strings that a schema allows, or "" if it allows no string.

        Raises:
            UnsupportedSchemaError: a keyword cannot be expressed as a terminal.
        """
        found = self._of(schema, path, MAX_DEPTH)
        return "" if found is None else f"( {' & '.join((self.any, *found))} )"

    def _of(self, schema: Any, path: str, depth: int) -> list[str] | None:
        """Return a list of terminals that a string must all match.

        Return None if the schema allows no string.
        """
        self._num_visited += 1
        if self._num_visited > MAX_SCHEMAS:
            raise UnsupportedSchemaError(
                path,
                f"more than {MAX_SCHEMAS} parts of the schema describe strings: send a smaller one",
            )
        if schema is True:
            return []
        if not isinstance(schema, dict) or "string" not in types_of(self._root, schema):
            return None
        check_keywords(schema, path)
        if depth == 0:
            raise UnsupportedSchemaError(
                path, "$ref, anyOf, oneOf and allOf are nested too deeply: send a simpler schema"
            )
        if "string" not in named_types(schema.get("type")):
            return None
        found: list[str] = self._own(schema, path)
        for below, branches in self._branches(schema, path):
            texts = [self._of(each, at, depth - 1) for at, each in branches]
            allowed = [text for text in texts if text is not None]
            if not allowed:
                return None
            if below == "oneOf" and len(allowed) > 1:
                raise UnsupportedSchemaError(
                    f"{path}/oneOf", "several branches of oneOf allow strings: use anyOf instead"
                )
            if all(allowed):
                found.append(f"( {' | '.join(' & '.join(text) for text in allowed)} )")
        return found

    def _branches(
        self, schema: Mapping[str, Any], path: str
    ) -> list[tuple[str, list[tuple[str, Any]]]]:
        """Return lists of schemas. A string must match at least one schema of every list."""
        found: list[tuple[str, list[tuple[str, Any]]]] = []
        if "$ref" in schema:
            reference = schema["$ref"]
            found.append(("$ref", [(reference[1:], resolved(self._root, reference, path))]))
        for key in ("anyOf", "oneOf", "allOf"):
            branches = [(f"{path}/{key}/{i}", each) for i, each in enumerate(schema.get(key, ()))]
            if key == "allOf":
                found += [(key, [branch]) for branch in branches]
            elif branches:
                found.append((key, branches))
        return found

    def _own(self, schema: Mapping[str, Any], path: str) -> list[str]:
        """Return the terminals for a schema's own keywords.

        `$ref`, `anyOf`, `oneOf` and `allOf` are left out (see `_branches`).
        """
        found = []
        for key in ("enum", "const"):
            if key in schema:
                values = schema[key] if key == "enum" else [schema[key]]
                texts = [each for each in values if isinstance(each, str)]
                for text in texts:
                    self.check_text(text, f"{path}/{key}")
                found.append(f"( {' | '.join(map(quoted, texts))} )")
        if "minLength" in schema or "maxLength" in schema:
            most = int(schema["maxLength"]) if "maxLength" in schema else ""
            found.append(f"/(?s:.{{{int(schema.get('minLength', 0))},{most}}})/")
        if "pattern" in schema:
            try:
                found.append(terminal(schema["pattern"]))
            except ValueError as error:
                raise UnsupportedSchemaError(f"{path}/pattern", str(error)) from error
        if "format" in schema:
            if schema["format"] not in FORMATS:
                raise UnsupportedSchemaError(
                    f"{path}/format",
                    f"the format {schema['format']!r:.80} is not supported in this model's tool "
                    f"call format: expected one of {', '.join(FORMATS)}",
                )
            found.append(f"/{FORMATS[schema['format']]}/")
        return found

    def check_text(self, text: str, path: str) -> None:
        """Raise `UnsupportedSchemaError` if a text contains a marker."""
        for marker in self._markers:
            if marker in text:
                raise UnsupportedSchemaError(
                    path,
                    f"the string {text[:80]!r} contains {marker!r}, which ends strings in this "
                    f"model's tool call format: remove {marker!r}",
                )


def check_keywords(schema: Mapping[str, Any], path: str) -> None:
    """Raise `UnsupportedSchemaError` if a keyword is not in `KNOWN`, or `type` is malformed."""
    types = schema.get("type", [])
    if not all(isinstance(each, str) for each in (types if isinstance(types, list) else [types])):
        raise UnsupportedSchemaError(
            f"{path}/type", f"type is {types!r:.80}: expected a string or a list of strings"
        )
    for key in schema:
        if key not in KNOWN:
            raise UnsupportedSchemaError(
                f"{path}/{escaped(key)}",
                f"{key[:80]} is not supported in this model's tool call format: remove it",
            )


def resolved(root: Any, reference: Any, path: str) -> Any:
    """Return the schema to which a reference refers."""
    found = referred(root, reference) if isinstance(reference, str) else None
    if found is None:
        raise UnsupportedSchemaError(
            f"{path}/$ref",
            f"{value_text(reference)} does not exist in the schema: correct the reference",
        )
    return found


def quoted(text: str) -> str:
    """Return a text as a string literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)
