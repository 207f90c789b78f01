"""Calls of Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]<|/tool_call|>`.

Older templates ask for `functools[{"name": ..., "arguments": {...}}]`.
"""

from collections.abc import Sequence

from penstock.router.parsers.tools.call_grammar import CallForm, CallGrammar
from penstock.router.parsers.tools.json_reader import JsonListReader

OPEN, CLOSE, OLD = "<|tool_call|>", "<|/tool_call|>", "functools["


class PhiParser(JsonListReader):
    """Parses one answer of Phi-4 mini."""

    markers = (OPEN, CLOSE)

    @classmethod
    def call_forms(cls, grammar: CallGrammar) -> Sequence[CallForm]:
        calls = f'SPACE {grammar.calls()} "]"'
        closed = f'SPACE "[" {calls} SPACE {grammar.marker(CLOSE)}'
        return [CallForm(OPEN, closed), CallForm(OLD, calls)]

    def _start(self) -> bool:
        text, marker = self._until(OPEN, CLOSE, OLD)
        self._add_content(text)
        if marker == OPEN:
            return self._begin_list(OPEN)
        if marker == OLD:
            self._text = "[" + self._text
            return self._begin_list(OLD[:-1])
        return marker is not None
