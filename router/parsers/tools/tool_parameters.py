"""JSON types of the parameters of tools, for formats whose values do not show their types."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from penstock.common.schema_types import parameter_types


def function_lines(tools: Iterable[Mapping[str, Any]]) -> bytes:
    """Return one line per checked tool in OpenAI's form: the function's name and its parameters.

    The parameters are JSON. Names of functions contain neither spaces nor newlines.
    """
    functions = [tool["function"] for tool in tools]
    lines = [f"{each['name']} {json.dumps(each.get('parameters'))}" for each in functions]
    return "\n".join(lines).encode()


class ToolParameters:
    """The parameters of the tools of a chat.

    The parameters of a function are parsed when its first call needs them, because parsing those of
    all functions may take 30 ms.

    Args:
        functions: the tools, from `function_lines`.
    """

    def __init__(self, functions: bytes = b"") -> None:
        self._functions = functions
        self._schemas: dict[str, Any] = {}  # parsed parameters, by function

    def has(self, function: str) -> bool:
        """Return whether a tool has this name."""
        return self._start_of(function) >= 0

    def types_of(self, function: str, parameter: str) -> frozenset[str]:
        """Return the JSON types that a parameter may have; all types if the schema sets none."""
        if function not in self._schemas and (start := self._start_of(function)) >= 0:
            end = self._functions.find(b"\n", start)
            line = self._functions[start : None if end < 0 else end]
            self._schemas[function] = json.loads(line)
        return parameter_types(self._schemas.get(function), parameter)

    def _start_of(self, function: str) -> int:
        """Return where the parameters of a function begin, or -1 if no tool has this name."""
        if not function or " " in function or "\n" in function:
            return -1
        prefix = function.encode(errors="replace") + b" "
        if self._functions.startswith(prefix):
            return len(prefix)
        found = self._functions.find(b"\n" + prefix)
        return found if found < 0 else found + 1 + len(prefix)
