"""Calls of DeepSeek's models, written with special tokens.

V3 and R1 write a type, a name, and the arguments in a Markdown code block. V3.1 writes only the
name and the arguments:

    CALLS_BEGIN CALL_BEGIN function SEP name \\n ```json \\n {...} \\n ``` CALL_END ... CALLS_END
    CALLS_BEGIN CALL_BEGIN name SEP {...} CALL_END ... CALLS_END
"""

from collections.abc import Sequence

from penstock.router.parsers.json_span import JsonSpan
from penstock.router.parsers.reader import Reader
from penstock.router.parsers.tools.call_grammar import CallForm, CallGrammar

_BAR = "\uff5c"  # the full-width bar in the names of DeepSeek's special tokens
CALLS_BEGIN, CALLS_END = f"<{_BAR}tool▁calls▁begin{_BAR}>", f"<{_BAR}tool▁calls▁end{_BAR}>"
CALL_BEGIN, CALL_END = f"<{_BAR}tool▁call▁begin{_BAR}>", f"<{_BAR}tool▁call▁end{_BAR}>"
SEP = f"<{_BAR}tool▁sep{_BAR}>"


class DeepSeekV31Parser(Reader):
    """Parses one answer of DeepSeek V3.1."""

    calls_begin, calls_end, separator = CALLS_BEGIN, CALLS_END, SEP
    call_begin, call_end = CALL_BEGIN, CALL_END
    markers: tuple[str, ...] = (CALLS_BEGIN, CALLS_END, CALL_BEGIN, CALL_END, SEP)

    @classmethod
    def call_forms(cls, grammar: CallGrammar) -> Sequence[CallForm]:
        begin, end = grammar.marker(cls.call_begin), grammar.marker(cls.call_end)
        separator = grammar.marker(cls.separator)
        call = grammar.each(lambda name, arguments: cls._call_form(separator, name, arguments))
        one = f"SPACE {begin} {call} SPACE {end}"
        calls = f"{one} {grammar.more(one)} SPACE {grammar.marker(cls.calls_end)}"
        return [CallForm(cls.calls_begin, calls)]

    @classmethod
    def _call_form(cls, separator: str, name: str, arguments: str) -> str:
        """Return the form of a call of one function."""
        return f'"{name}" {separator} SPACE {arguments}'

    def __init__(self) -> None:
        super().__init__()
        self._head = ""
        self._span = JsonSpan()

    def _start(self) -> bool:
        text, marker = self._until(self.calls_begin, self.calls_end)
        self._add_content(text)
        if marker == self.calls_begin:
            self._state = self._between
        return marker is not None

    def _between(self) -> bool:
        """Skip the text between calls."""
        _, marker = self._until(self.call_begin, self.calls_end)
        if marker == self.call_begin:
            self._head = ""
            self._state = self._read_head
        elif marker == self.calls_end:
            self._state = self._start
        return marker is not None

    def _read_head(self) -> bool:
        """Read the text before the separator, which is the name."""
        text, marker = self._until(self.separator)
        self._head += text
        if marker:
            self._begin(self._head)
        return marker is not None

    def _begin(self, name: str, call_id: str = "") -> None:
        if name.strip():
            self._add_call(name.strip(), call_id)
            self._span = JsonSpan()
            self._state = self._before_arguments
        else:
            self._state = self._between

    def _before_arguments(self) -> bool:
        if not self._skip():
            return False
        is_empty = self._starts_with(self.call_end)
        if is_empty is None:
            return False
        if is_empty:
            self._add_arguments("{}")
        self._state = self._between if is_empty else self._read_arguments
        return True

    def _read_arguments(self) -> bool:
        used = self._span.feed(self._text)
        self._add_arguments(self._text[:used])
        self._text = self._text[used:]
        if self._span.is_ended:
            self._state = self._between
        return True

    def _end(self) -> None:
        if self._state == self._read_head:
            self._text = self._head + self._text
        elif self._state in (self._between, self._before_arguments):
            self._text = ""
        super()._end()


class DeepSeekV3Parser(DeepSeekV31Parser):
    """Parses one answer of DeepSeek V3 or R1, whose calls have JSON in a Markdown code block."""

    @classmethod
    def _call_form(cls, separator: str, name: str, arguments: str) -> str:
        return f'"function" {separator} "{name}\\n```json\\n" {arguments} "\\n```"'

    def _begin(self, name: str, call_id: str = "") -> None:
        # The type before the separator is not used. The name follows on a line of its own.
        self._head = ""
        self._state = self._read_name

    def _read_name(self) -> bool:
        text, marker = self._until("\n", "{", self.call_end)
        self._head += text
        if marker is None or marker == self.call_end:
            self._state = self._between if marker else self._state
            return marker is not None
        if marker == "{":
            self._text = marker + self._text
        super()._begin(self._head)
        return True

    def _before_arguments(self) -> bool:
        """Skip the start of the code block."""
        _, marker = self._until("{", self.call_end)
        if marker == "{":
            self._text = marker + self._text
            self._state = self._read_arguments
        elif marker == self.call_end:
            self._add_arguments("{}")
            self._state = self._between
        return marker is not None

    def _end(self) -> None:
        if self._state == self._read_name:
            self._text = self._head + self._text
        super()._end()
