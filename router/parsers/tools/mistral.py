"""Calls of Mistral's models, in two forms.

- `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`
- `[TOOL_CALLS]name{...}` for each call, since version 11 of the tokenizer. `[CALL_ID]id` and then
  `[ARGS]` may follow the name.
"""

from collections.abc import Sequence

from penstock.router.parsers.json_span import JsonSpan
from penstock.router.parsers.tools.call_grammar import CallForm, CallGrammar
from penstock.router.parsers.tools.json_reader import JsonListReader

OPEN, CALL_ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(JsonListReader):
    """Parses one answer of Mistral's models."""

    markers = (OPEN, CALL_ID, ARGS)

    @classmethod
    def call_forms(cls, grammar: CallGrammar) -> Sequence[CallForm]:
        call_id = f"( {grammar.marker(CALL_ID)} /[A-Za-z0-9]{{1,32}}/ )?"
        between = f"{call_id} ( {grammar.marker(ARGS)} )?"
        named = grammar.each(lambda name, arguments: f'"{name}" {between} {arguments}')
        return [CallForm(OPEN, f'( SPACE "[" SPACE {grammar.calls()} "]" | {named} )')]

    def __init__(self) -> None:
        super().__init__()
        self._name = ""
        self._span = JsonSpan()

    def _start(self) -> bool:
        text, marker = self._until(OPEN)
        self._add_content(text)
        if marker:
            self._state = self._read_form
        return marker is not None

    def _read_form(self) -> bool:
        if not self._skip():
            return False
        if self._text[0] == "[":
            return self._begin_list(OPEN)
        self._name = ""
        self._state = self._read_name
        return True

    def _read_name(self) -> bool:
        text, marker = self._until(CALL_ID, ARGS, "{", OPEN)
        self._name += text
        if marker is None:
            return False
        if marker == OPEN:
            self._add_content(OPEN + self._name)
            self._state = self._read_form
            return True
        self._state = self._skip_id if marker == CALL_ID else self._begin_object
        if marker == "{":
            self._text = marker + self._text
        return True

    def _skip_id(self) -> bool:
        _, marker = self._until(ARGS, "{")
        if marker == "{":
            self._text = marker + self._text
        if marker:
            self._state = self._begin_object
        return marker is not None

    def _begin_object(self) -> bool:
        if not self._skip():
            return False
        if self._text[0] != "{" or not self._name.strip():
            self._add_content(OPEN + self._name)
            self._state = self._start
            return True
        self._add_call(self._name.strip())
        self._span = JsonSpan()
        self._state = self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        used = self._span.feed(self._text)
        self._add_arguments(self._text[:used])
        self._text = self._text[used:]
        if self._span.is_ended:
            self._state = self._start
        return True

    def _end(self) -> None:
        if self._state in (self._read_form, self._read_name, self._skip_id, self._begin_object):
            self._text = OPEN + self._name + self._text
        super()._end()
