"""Reads a tool call that is a JSON object, in text that arrives in pieces."""

import json
from enum import Enum

from penstock.router.parsers.json_span import JsonSpan
from penstock.router.parsers.surrogates import without_surrogates

NAME = "name"
ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class _State(Enum):
    START = 0
    KEY = 1
    COLON = 2
    BEFORE_VALUE = 3
    VALUE = 4
    COMMA = 5
    END = 6
    FAILED = 7


class JsonCall:
    """A call such as `{"name": "add", "arguments": {"a": 1}}`.

    The members may have any order, and unknown members are skipped. The arguments may also be named
    `parameters`, or be a JSON text in a string.

    Attributes:
        name: name of the function; empty until the text is certain to be a call.
        raw: all text that was read until `name` was known.
    """

    def __init__(self, needs_arguments: bool) -> None:
        self.name = ""
        self.raw = ""
        self._needs_arguments = needs_arguments
        self._state = _State.START
        self._given_name = ""
        self._key = ""
        self._value = ""  # text of a key, or of a value that is not streamed
        self._span = JsonSpan()
        self._arguments = ""  # text of the arguments that was not yet returned
        self._has_arguments = False
        self._is_streamed = False  # whether the value is an object of arguments, which is streamed

    @property
    def is_ended(self) -> bool:
        """Whether the object is complete."""
        return self._state is _State.END

    @property
    def has_failed(self) -> bool:
        """Whether the text has turned out not to be a call."""
        return self._state is _State.FAILED

    def feed(self, text: str) -> int:
        """Read the start of `text`; return the number of characters that were read.

        The number is less than the length of `text` if the call has ended or failed.
        """
        at = 0
        while at < len(text) and self._state not in (_State.END, _State.FAILED):
            at = self._read(text, at)
        if not self.name:
            self.raw += text[:at]
        return at

    def take_arguments(self) -> str:
        """Return the arguments' new text; empty while the name is unknown."""
        if not self.name:
            return ""
        found, self._arguments = self._arguments, ""
        return found

    def _read(self, text: str, at: int) -> int:
        if self._state is _State.VALUE or (self._state is _State.KEY and self._value):
            return self._read_value(text, at)
        if text[at] in _SPACE:
            return at + 1
        return self._read_structure(text, at)

    def _read_structure(self, text: str, at: int) -> int:
        character = text[at]
        match self._state:
            case _State.START if character == "{":
                self._state = _State.KEY
            case _State.KEY if character == '"':
                self._value, self._span = character, JsonSpan()
                self._span.feed(character)
            case _State.KEY | _State.COMMA if character == "}":
                self._end()
            case _State.COLON if character == ":":
                self._state = _State.BEFORE_VALUE
            case _State.BEFORE_VALUE:
                return self._begin_value(character, at)
            case _State.COMMA if character == ",":
                self._state = _State.KEY
            case _:
                self._state = _State.FAILED
                return at
        return at + 1

    def _begin_value(self, character: str, at: int) -> int:
        self._span, self._value = JsonSpan(), ""
        self._is_streamed = self._key in ARGUMENTS and character == "{"
        if self._is_streamed:
            self._has_arguments = True
            self._decide()
        self._state = _State.VALUE
        return at

    def _read_value(self, text: str, at: int) -> int:
        end = at + self._span.feed(text[at:])
        if self._is_streamed and self._state is _State.VALUE:
            self._arguments += text[at:end]
        else:
            self._value += text[at:end]
        if self._span.is_ended:
            self._end_value()
        return end

    def _end_value(self) -> None:
        if self._state is _State.KEY:
            self._key, self._value = _loaded_text(self._value), ""
            self._state = _State.COLON
            return
        self._state = _State.COMMA
        if self._is_streamed:
            return
        if not self._value:
            self._state = _State.FAILED
        elif self._key == NAME:
            self._given_name = _loaded_text(self._value)
        elif self._key in ARGUMENTS:
            self._has_arguments = True
            self._arguments = _arguments(self._value)
        self._value = ""
        self._decide()

    def _decide(self) -> None:
        """Set `name` once the name and the arguments of the call are known."""
        if self._given_name and self._has_arguments:
            self.name = self._given_name

    def _end(self) -> None:
        self._state = _State.END
        if not self._has_arguments and not self._needs_arguments:
            self._has_arguments, self._arguments = True, "{}"
            self._decide()
        if not self.name:
            self._state = _State.FAILED


def _loaded_text(text: str) -> str:
    try:
        found = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return ""
    return without_surrogates(found) if isinstance(found, str) else ""


def _arguments(text: str) -> str:
    """Return arguments that are not written as an object: null, or a string with a JSON text."""
    if text == "null":
        return "{}"
    return _loaded_text(text) or text
