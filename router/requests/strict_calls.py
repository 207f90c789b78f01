"""Functions with `strict`, whose calls must fit their schema.

The model still decides whether to call a function.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic_core import from_json

from penstock.common.structured_outputs import MAX_BYTES, StructuredOutputs
from penstock.router.errors import invalid
from penstock.router.parsers.tools.call_grammar import CallsGrammar
from penstock.router.requests.forced_calls import NO_PARAMETERS


def strict_calls(functions: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the functions that may be called, or empty bytes if none is strict.

    The result has two lines: a JSON array of all names, and a JSON array with the schema of each
    strict function's arguments, or null for other functions. If the schemas are too long for a
    constraint, the second line is their length in bytes.

    Args:
        functions: checked functions in OpenAI's form.
    """
    if not any(function.get("strict") for function in functions):
        return b""
    names = [each["name"] for each in functions]
    schemas = [
        (each.get("parameters") or NO_PARAMETERS) if each.get("strict") else None
        for each in functions
    ]
    found = _dumps(schemas).encode()
    if len(found) > MAX_BYTES:
        found = b"%d" % len(found)
    return _dumps(names).encode() + b"\n" + found


def strict_form(
    calls: bytes, grammar_of: Callable[[Sequence[str]], CallsGrammar | None]
) -> StructuredOutputs | None:
    """Return the constraint under which calls of strict functions fit their schema.

    Returns None if the model's format of calls has no grammar.

    Args:
        calls: the functions, from `strict_calls`.
        grammar_of: returns the grammar of answers for the names of functions.

    Raises:
        ServingError: INVALID if the schemas are too long.
    """
    names, _, schemas = calls.decode().partition("\n")
    if not schemas.startswith("["):
        raise invalid(
            f"the parameters of tools with 'strict' have {schemas} bytes as JSON; at most "
            f"{MAX_BYTES} are allowed",
            "tools",
        )
    grammar = grammar_of(from_json(names))
    if grammar is None:
        return None
    notation = _dumps(asdict(grammar.notation))
    # The schemas are not parsed, because that would hold the event loop for milliseconds.
    text = (
        f'{{"grammar": {_dumps(grammar.text)}, "names": {names}, "arguments": {schemas}, '
        f'"notation": {notation}}}'
    )
    return StructuredOutputs("tool_calls", text)


def _dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
