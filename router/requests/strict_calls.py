"""Functions with `strict`, whose calls must fit their schema.

The model still decides whether to call a function.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic_core import from_json

from penstock.common.structured_outputs import StructuredOutputs
from penstock.router.parsers.tools.call_grammar import CallsGrammar
from penstock.router.requests.forced_calls import NO_PARAMETERS
from penstock.router.requests.json_text import dumps


def strict_calls(functions: Sequence[Mapping[str, Any]]) -> bytes:
    """Return the functions that may be called, as JSON, or empty bytes if none is strict.

    Args:
        functions: checked functions in OpenAI's form.
    """
    if not any(function.get("strict") for function in functions):
        return b""
    rows = [
        (each["name"], (each.get("parameters") or NO_PARAMETERS) if each.get("strict") else None)
        for each in functions
    ]
    return dumps(rows).encode()


def strict_form(
    calls: bytes, grammar_of: Callable[[Sequence[str]], CallsGrammar | None]
) -> StructuredOutputs | None:
    """Return the constraint under which calls of strict functions fit their schema.

    Returns None if the model's format of calls has no grammar.

    Args:
        calls: the functions, from `strict_calls`.
        grammar_of: returns the grammar of answers for the names of functions.
    """
    names, schemas = zip(*from_json(calls), strict=True)
    grammar = grammar_of(names)
    if grammar is None:
        return None
    text = {
        "grammar": grammar.text,
        "names": names,
        "arguments": schemas,
        "notation": asdict(grammar.notation),
    }
    return StructuredOutputs("tool_calls", json.dumps(text, ensure_ascii=False))
