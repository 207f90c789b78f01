"""Finds the end of a JSON value in text that arrives in pieces."""

import re

_NOT_STRUCTURE = re.compile(r'[^"{}\[\],\s]+')
_IN_STRING = re.compile(r'[^"\\]+')
_CLOSING = "}]"
_OPENING = "{["


class JsonSpan:
    """Reads one JSON value, which need not be valid.

    The end of the value is found from its strings and brackets.

    Attributes:
        is_ended: whether the value is complete.
    """

    def __init__(self) -> None:
        self.is_ended = False
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._is_scalar = False  # whether the value is a number or a word

    def feed(self, text: str) -> int:
        """Return how many characters of `text` belong to the value.

        `text` continues the texts of earlier calls. The first text must begin with the value,
        without white space before it.
        """
        at = 0
        while at < len(text) and not self.is_ended:
            at = self._read_string(text, at) if self._in_string else self._read(text, at)
        return at

    def finish(self) -> None:
        """End a number or a word at the end of the text."""
        self.is_ended |= self._is_scalar

    def _read_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        if found := _IN_STRING.match(text, at):
            return found.end()
        if text[at] == "\\":
            self._is_escaped = True
        else:
            self._in_string = False
            self.is_ended = self._depth == 0
        return at + 1

    def _read(self, text: str, at: int) -> int:
        if found := _NOT_STRUCTURE.match(text, at):
            self._is_scalar = self._depth == 0
            return found.end()
        character = text[at]
        if self._is_scalar:  # a space, comma, quote or bracket ends a number or word
            self.is_ended = True
            return at
        if character == '"':
            self._in_string = True
        elif character in _OPENING:
            self._depth += 1
        elif character in _CLOSING:
            self._depth -= 1
            self.is_ended = self._depth <= 0
            return at if self._depth < 0 else at + 1
        elif self._depth == 0:
            self.is_ended = True  # neither a value nor white space: stop here
            return at
        return at + 1
