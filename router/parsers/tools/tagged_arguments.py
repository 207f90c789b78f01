"""Base class of parsers for calls whose arguments are between tags, without JSON quotes.

The text between the tags of a parameter is either a plain string or a JSON value, depending on the
parameter's schema.
"""

import json
import re

from penstock.common.schema_types import STRING, TEXT_OR_NULL, types_of_value
from penstock.router.parsers.reader import Reader
from penstock.router.parsers.tools.python_value import value_as_json
from penstock.router.parsers.tools.tool_parameters import ToolParameters

NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)


class TaggedArgumentsParser(Reader):
    """Writes the arguments of calls as JSON while their values arrive.

    A value is streamed if its schema allows only strings, or strings and null. Other values are
    held back until they are complete. A JSON value of a type that the schema allows is then written
    unchanged. Any other text becomes a string if the schema allows strings. Otherwise it is written
    as JSON if it is a value in Python's syntax.

    Args:
        tools: the parameters of the tools.
    """

    strips_newlines = False
    """Whether one newline after the start tag and one before the end tag are no part of a value."""

    def __init__(self, tools: ToolParameters | None = None) -> None:
        super().__init__()
        self._tools = tools or ToolParameters()
        self._function = ""
        self._num_arguments = 0
        self._types = STRING
        self._is_streamed = False
        self._value = ""  # text of a value that is not streamed
        self._newline = ""  # newline that belongs to the value only if more text follows
        self._is_empty = True  # whether the value has no text yet

    def _begin_call(self, name: str) -> None:
        self._function = name
        self._num_arguments = 0
        self._add_call(name)

    def _end_call(self) -> None:
        self._add_arguments("}" if self._num_arguments else "{}")

    def _begin_value(self, key: str) -> None:
        """Begin an argument; `_continue_value` and `_end_value` write its value."""
        self._types = self._tools.types_of(self._function, key)
        opening = ", " if self._num_arguments else "{"
        self._add_arguments(f"{opening}{json.dumps(key, ensure_ascii=False)}: ")
        self._num_arguments += 1
        self._value = self._newline = ""
        self._is_empty, self._is_streamed = True, False
        if self._types == STRING:
            self._begin_string()

    def _begin_string(self) -> None:
        self._is_streamed = True
        self._add_arguments('"')
        self._add_string(self._value)

    def _add_string(self, text: str) -> None:
        self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])

    def _continue_value(self, text: str) -> None:
        if self.strips_newlines and text:
            if self._is_empty:
                self._is_empty = False
                text = text.removeprefix("\n")
            text = self._newline + text
            self._newline = "\n" if text.endswith("\n") else ""
            text = text.removesuffix("\n")
        if self._is_streamed:
            self._add_string(text)
            return
        self._value += text
        if self._types == TEXT_OR_NULL and not "null".startswith(self._value):
            self._begin_string()

    def _end_value(self) -> None:
        self._add_arguments('"' if self._is_streamed else _typed(self._value, self._types))


def _typed(text: str, types: frozenset[str]) -> str:
    """Return the text of a value as JSON.

    The value has one of the JSON types in `types` if the text allows that.
    """
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        is_text = "string" in types
        return json.dumps(text, ensure_ascii=False) if is_text else value_as_json(text.strip())
    if types_of_value(value) & types or "string" not in types:
        return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> None:
    """Refuse a constant such as NaN, which Python reads but JSON does not have."""
    raise ValueError(name)
