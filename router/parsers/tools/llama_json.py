"""Calls of Llama 3.1 to 3.3: the answer is `{"name": ..., "parameters": {...}}`.

Several calls are separated by semicolons. `<|python_tag|>` may precede the first call.
"""

from collections.abc import Sequence

from penstock.router.parsers.tools.call_grammar import CallForm, CallGrammar, is_short
from penstock.router.parsers.tools.json_reader import JsonReader

TAG = "<|python_tag|>"
FIRST_MEMBER = '{"name"'


class LlamaJsonParser(JsonReader):
    """Parses one answer.

    An answer that does not begin with a call is content up to the first tag.

    Args:
        is_strict: whether to read only calls that the grammar of `call_forms` constrains.
    """

    markers = (TAG,)

    def __init__(self, is_strict: bool = False) -> None:
        super().__init__()
        self._is_strict = is_strict

    @classmethod
    def call_forms(cls, grammar: CallGrammar) -> Sequence[CallForm]:
        call = grammar.call("parameters")
        others = grammar.more(f'SPACE ( ";" | "," )? SPACE {call}') + " SPACE"
        # At the start of an answer, an object is a call only if its first member is the name.
        members = grammar.members("parameters", has_name=True)
        first = CallForm(FIRST_MEMBER, f'{members} SPACE "}}" {others}', only_first=True)
        return [first, CallForm(TAG, f"SPACE {call} {others}")]

    def _start(self) -> bool:
        rest = self._text.lstrip()
        if not rest or (TAG.startswith(rest) and rest != TAG and not self._is_ended):
            return False
        is_call = rest[0] == "{"
        if is_call and self._is_strict:
            if FIRST_MEMBER.startswith(rest) and rest != FIRST_MEMBER and not self._is_ended:
                return False
            spaces = self._text[: len(self._text) - len(rest)]
            is_call = is_short(spaces) and rest.startswith(FIRST_MEMBER)
        self._state = self._read_object if is_call else self._read_content
        return True

    def _read_content(self) -> bool:
        text, marker = self._until(TAG)
        self._add_content(text)
        if marker:
            self._state = self._read_object
        return marker is not None

    def _read_object(self) -> bool:
        rest = self._text.lstrip()
        if not rest:
            return False
        opened = self._text[: len(self._text) - len(rest)]
        if rest[0] == "{":
            self._text = rest
            return self._begin_json(opened, self._read_next, self._read_content, True)
        self._state = self._read_content
        return True

    def _read_next(self) -> bool:
        if not self._skip(" \t\r\n;,"):
            return False
        self._state = self._read_object if self._text[0] == "{" else self._read_content
        return True
