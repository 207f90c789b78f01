"""Parsers of answers that must be tool calls, because the client's `tool_choice` requires it."""

from penstock.router.parsers.pieces import ARGUMENTS, CALL, Piece
from penstock.router.parsers.tools.json_reader import JsonListReader


class RequiredCallsParser(JsonListReader):
    """Parser of an answer that consists of calls: `[{"name": ..., "parameters": {...}}, ...]`."""

    markers = ()

    def _start(self) -> bool:
        if self._num_calls == 0 and not self._opened:
            return self._begin_list("")
        self._add_content(self._text)
        self._text = ""
        return False


class NamedCallParser:
    """Parser of an answer that consists of the arguments of one call.

    Args:
        name: name of the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_begun = False

    def feed(self, text: str) -> list[Piece]:
        """Append text; return the pieces that later text cannot change."""
        if not text:
            return []
        begin = [] if self._has_begun else [Piece(CALL, self._name)]
        self._has_begun = True
        return [*begin, Piece(ARGUMENTS, text)]

    def finish(self) -> list[Piece]:
        """Return no pieces, since no text is held back."""
        return []
