"""The pieces of one answer: content, reasoning and tool calls, with its finish reason."""

from penstock.router.parsers.pieces import CALL, CONTENT, OutputParser, Piece

TOOL_CALLS = "tool_calls"
"""Finish reason of an answer that ended with tool calls."""


class AnswerPieces:
    """Splits the text of one answer into pieces as it arrives.

    Args:
        parser: parser of the answer, or None if all of its text is content.
    """

    def __init__(self, parser: OutputParser | None) -> None:
        self._parser = parser
        self._has_calls = False

    def feed(self, text: str, has_ended: bool = False) -> list[Piece]:
        """Append text; return the new pieces. At the end they include all held-back text."""
        if self._parser is None:
            return [Piece(CONTENT, text)] if text else []
        pieces = self._parser.feed(text) if text else []
        if has_ended:
            pieces += self._parser.finish()
        self._has_calls = self._has_calls or any(piece.kind == CALL for piece in pieces)
        return pieces

    def finish_reason(self, given: str) -> str:
        """Return the finish reason. `stop` becomes `tool_calls` if the answer has tool calls."""
        return TOOL_CALLS if given == "stop" and self._has_calls else given
