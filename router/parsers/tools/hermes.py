"""Calls of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from collections.abc import Sequence

from penstock.router.parsers.tools.call_grammar import CallForm, CallGrammar
from penstock.router.parsers.tools.json_reader import JsonReader

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class HermesParser(JsonReader):
    """Parses one answer; text between the tags that is not a call is content."""

    markers = (OPEN, CLOSE)

    @classmethod
    def call_forms(cls, grammar: CallGrammar) -> Sequence[CallForm]:
        return [CallForm(OPEN, f"SPACE {grammar.call()} SPACE {grammar.marker(CLOSE)}")]

    def _start(self) -> bool:
        text, marker = self._until(OPEN)
        self._add_content(text)
        return self._begin_json(OPEN, self._close, self._start) if marker else False

    def _close(self) -> bool:
        """Skip the end tag, which models sometimes forget."""
        _, marker = self._until(OPEN, CLOSE)
        if marker == OPEN:
            return self._begin_json(OPEN, self._close, self._start)
        if marker == CLOSE:
            self._state = self._start
        return marker is not None

    def _end(self) -> None:
        if self._state == self._close:
            self._text = ""
        super()._end()
