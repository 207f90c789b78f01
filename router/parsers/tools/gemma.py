"""Calls of FunctionGemma and Gemma 4, which write strings in special quotes.

<start_function_call>call:add{a:1,b:<escape>x<escape>}<end_function_call>
<|tool_call>call:add{a:1,b:<|"|>x<|"|>}<tool_call|>
"""

import json
from collections.abc import Sequence

from penstock.common.argument_notation import ArgumentNotation
from penstock.router.parsers.reader import Reader
from penstock.router.parsers.tools.call_grammar import CallForm, CallGrammar

PREFIX = "call:"


class FunctionGemmaParser(Reader):
    """Parses one answer of FunctionGemma, and translates the arguments to JSON."""

    open, close, quote = "<start_function_call>", "<end_function_call>", "<escape>"
    markers = (open, close, quote)

    @classmethod
    def call_forms(cls, grammar: CallGrammar) -> Sequence[CallForm]:
        call = grammar.each(lambda name, arguments: f'"{PREFIX}{name}" {arguments}')
        return [CallForm(cls.open, f"{call} {grammar.marker(cls.close)}")]

    @classmethod
    def notation(cls, grammar: CallGrammar) -> ArgumentNotation:
        end = grammar.marker(cls.quote)
        return ArgumentNotation(
            "bracketed",
            end=cls.quote,
            end_token=end if end.startswith("<[") else "",
            markers=(cls.quote,),
        )

    def __init__(self) -> None:
        super().__init__()
        self._head = ""
        self._bare = ""  # text read so far that is outside of strings
        self._brackets: list[str] = []  # closing brackets that are still missing
        self._is_key = False  # whether the next text is the name of a member

    def _start(self) -> bool:
        text, marker = self._until(self.open, self.close)
        self._add_content(text)
        if marker == self.open:
            self._head = ""
            self._state = self._read_head
        return marker is not None

    def _read_head(self) -> bool:
        text, marker = self._until("{", self.close)
        self._head += text
        name = self._head.strip().removeprefix(PREFIX).strip()
        if marker == "{" and name:
            self._add_call(name)
            self._open_bracket("{")
            self._state = self._read_bare
        elif marker:
            self._add_content(self.open + self._head + marker)
            self._state = self._start
        return marker is not None

    def _read_bare(self) -> bool:
        """Read text outside of strings up to the next bracket, comma, colon or quote."""
        text, marker = self._until(self.quote, *"{}[],:")
        self._bare += text
        if marker is None:
            return False
        if marker == self.quote:
            self._bare = ""
            self._add_arguments('"')
            self._state = self._read_string
        elif marker == ":" and not self._is_key:
            self._bare += marker
        else:
            self._read_sign(marker)
        return True

    def _read_sign(self, sign: str) -> None:
        self._end_bare()
        match sign:
            case "{" | "[":
                self._open_bracket(sign)
            case ":":
                self._is_key = False
                self._add_arguments(": ")
            case ",":
                self._is_key = self._brackets[-1] == "}"
                self._add_arguments(", ")
            case _:
                self._add_arguments(self._brackets.pop())
                self._is_key = False
                if not self._brackets:
                    self._state = self._after

    def _read_string(self) -> bool:
        text, marker = self._until(self.quote)
        self._add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        if marker:
            self._add_arguments('"')
            self._state = self._read_bare
        return marker is not None

    def _open_bracket(self, bracket: str) -> None:
        self._brackets.append("}" if bracket == "{" else "]")
        self._is_key = bracket == "{"
        self._bare = ""
        self._add_arguments(bracket)

    def _end_bare(self) -> None:
        """Add the name of a member, a number or a word."""
        text, self._bare = self._bare.strip(), ""
        if text:
            self._add_arguments(
                json.dumps(text, ensure_ascii=False) if self._is_key else _word(text)
            )

    def _after(self) -> bool:
        _, marker = self._until(self.open, self.close)
        if marker == self.open:
            self._head = ""
            self._state = self._read_head
        elif marker:
            self._state = self._start
        return marker is not None

    def _end(self) -> None:
        if self._state == self._read_head:
            self._text = self.open + self._head + self._text
        elif self._state != self._start:
            self._text = ""
        super()._end()


class Gemma4Parser(FunctionGemmaParser):
    """Parses one answer of Gemma 4."""

    open, close, quote = "<|tool_call>", "<tool_call|>", '<|"|>'
    markers = (open, close, quote)


def _word(text: str) -> str:
    """Return a number or a word as JSON."""
    try:
        json.loads(text)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return text
