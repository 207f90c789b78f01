"""Random constraints with short answers, and a check of answers.

The check does not use grammars, so that it is independent of the code under test.
"""

import json
import re
from random import Random
from typing import Any

import jsonschema

from penstock.common.structured_outputs import StructuredOutputs, choice, json_schema

LARK = 'start: "<" (start | NAME) ">"\nNAME: /[ab]{1,3}/'
"""A grammar that is not regular: equal numbers of opening and closing brackets."""

_BRACKETS = re.compile(r"(<+)[ab]{1,3}(>+)")
_NAMES = ("name", "size", "n", "größe")
_COLOURS = ("red", "blue", "reddish", "rot\n", "日")


def draw_constraint(numbers: Random) -> StructuredOutputs:
    """Return a random constraint of a random kind."""
    kind = numbers.choice(("json", "json", "json", "regex", "choice", "grammar"))
    if kind == "json":
        return json_schema(_schema(numbers))
    if kind == "choice":
        return choice(numbers.sample(_COLOURS, numbers.randint(1, len(_COLOURS))))
    if kind == "grammar":
        return StructuredOutputs("grammar", LARK)
    low = numbers.randint(1, 6)
    return StructuredOutputs("regex", f"(?:re[a-d]|[0-9]{{2}}|é){{{low},{low + 2}}}")


def is_valid(wanted: StructuredOutputs, text: bytes) -> bool:
    """Return whether the text of a complete answer satisfies a constraint of this module."""
    written = text.decode(errors="surrogateescape")
    match wanted.kind:
        case "json":
            return _is_valid_json(json.loads(wanted.text), written)
        case "choice":
            return written in json.loads(wanted.text)
        case "grammar":
            found = _BRACKETS.fullmatch(written)
            return found is not None and len(found[1]) == len(found[2])
        case "regex":
            return re.fullmatch(wanted.text, written) is not None
        case kind:
            raise ValueError(
                f"cannot check an answer against a constraint of kind {kind!r}: add a check for "
                "this kind"
            )


def _is_valid_json(schema: dict[str, Any], written: str) -> bool:
    try:
        jsonschema.validate(json.loads(written), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def _schema(numbers: Random) -> dict[str, Any]:
    names = numbers.sample(_NAMES, numbers.randint(1, 2))
    return {
        "type": "object",
        "properties": {name: _value(numbers) for name in names},
        "required": names[: numbers.randint(1, len(names))],
        "additionalProperties": False,
    }


def _value(numbers: Random) -> dict[str, Any]:
    low = numbers.randint(-20, 20)
    return numbers.choice(
        (
            {"type": "integer", "minimum": low, "maximum": low + numbers.randint(0, 200)},
            {"enum": [*numbers.sample(_COLOURS, 2), None, True]},
            {"type": "boolean"},
            {"type": "string", "maxLength": numbers.randint(0, 4)},
            {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 3},
             "maxItems": 2},
        )
    )  # fmt: skip
