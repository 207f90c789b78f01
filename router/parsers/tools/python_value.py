"""Values of arguments in calls that are written in Python's syntax."""

import ast
import json

from penstock.router.parsers.surrogates import without_surrogates

_OPENING, _CLOSING = "([{", ")]}"


class PythonSpan:
    """Finds the end of a value: the comma or the closing bracket that follows the value.

    Attributes:
        is_ended: whether the value is complete.
    """

    def __init__(self) -> None:
        self.is_ended = False
        self._depth = 0
        self._quote = ""
        self._is_escaped = False

    def feed(self, text: str) -> int:
        """Return how many characters of `text`, which continues the value, belong to it."""
        for at, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._quote:
                self._is_escaped = character == "\\"
                if character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif self._depth == 0 and character in ",)]}":
                self.is_ended = True
                return at
            else:
                self._depth += (character in _OPENING) - (character in _CLOSING)
        return len(text)


def value_as_json(text: str) -> str:
    """Return a value in Python's or JSON's syntax as JSON, and any other text as a JSON string."""
    try:
        json.loads(text, parse_int=float, parse_constant=_refuse)
    except (ValueError, RecursionError):
        pass
    else:
        return text
    try:
        found = json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)
    return without_surrogates(found)


def _refuse(name: str) -> None:
    """Refuse a constant such as NaN, which Python reads but JSON does not have."""
    raise ValueError(name)
