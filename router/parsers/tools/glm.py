"""Calls of GLM 4.5 to 4.7, which write a name, then keys and values between tags.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

GLM 4.7 writes no newlines between the tags.
"""

import re
from collections.abc import Sequence

from penstock.common.argument_notation import ArgumentNotation
from penstock.router.parsers.tools.call_grammar import CallForm, CallGrammar
from penstock.router.parsers.tools.tagged_arguments import NAME, TaggedArgumentsParser
from penstock.router.parsers.tools.tool_parameters import ToolParameters

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END = "<arg_key>", "</arg_key>"
VALUE, VALUE_END = "<arg_value>", "</arg_value>"
HEAD = re.compile(r"\s{0,32}[\w.:/-]{0,128}\s{0,32}", re.ASCII)
"""Start of the text of a call, before its first tag."""


class GlmParser(TaggedArgumentsParser):
    """Parses one answer of GLM.

    If the text after an opening tag is not a tool call, the tag and the text are content.
    """

    markers = (OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END)

    @classmethod
    def call_forms(cls, grammar: CallGrammar) -> Sequence[CallForm]:
        call = grammar.each(lambda name, arguments: f'"{name}" {arguments}')
        return [CallForm(OPEN, f"SPACE {call} SPACE {grammar.marker(CLOSE)}")]

    @classmethod
    def notation(cls, grammar: CallGrammar) -> ArgumentNotation:
        end = grammar.marker(VALUE_END)
        return ArgumentNotation(
            "tagged",
            before_key=f"SPACE {grammar.marker(KEY)}",
            before_value=f"{grammar.marker(KEY_END)} SPACE {grammar.marker(VALUE)}",
            end=VALUE_END,
            end_token=end if end.startswith("<[") else "",
            markers=(VALUE_END,),
        )

    def __init__(self, tools: ToolParameters | None = None) -> None:
        super().__init__(tools)
        self._head = ""  # text of a call before its first tag
        self._key = ""

    def _start(self) -> bool:
        text, marker = self._until(OPEN)
        self._add_content(text)
        if marker:
            self._head = ""
            self._state = self._read_name
        return marker is not None

    def _read_name(self) -> bool:
        text, marker = self._until(KEY, CLOSE)
        self._head += text
        name = self._head.strip()
        if not HEAD.fullmatch(self._head) or (marker and not NAME.fullmatch(name)):
            self._text = self._head + (marker or "") + self._text
            self._add_content(OPEN)
            self._state = self._start
            return True
        if marker:
            self._begin_call(name)
            self._after_argument(marker)
        return marker is not None

    def _between(self) -> bool:
        """Skip the text between arguments."""
        _, marker = self._until(KEY, CLOSE, OPEN)
        if marker:
            self._after_argument(marker)
        return marker is not None

    def _after_argument(self, marker: str) -> None:
        self._key = self._head = ""
        if marker == KEY:
            self._state = self._read_key
            return
        self._end_call()
        self._state = self._start if marker == CLOSE else self._read_name

    def _read_key(self) -> bool:
        text, marker = self._until(KEY_END)
        self._key += text
        if marker:
            self._state = self._before_value
        return marker is not None

    def _before_value(self) -> bool:
        _, marker = self._until(VALUE, KEY, CLOSE, OPEN)
        if marker == VALUE:
            self._begin_value(self._key.strip())
            self._state = self._read_value
        elif marker:
            self._after_argument(marker)
        return marker is not None

    def _read_value(self) -> bool:
        text, marker = self._until(VALUE_END)
        self._continue_value(text)
        if marker:
            self._end_value()
            self._state = self._between
        return marker is not None

    def _end(self) -> None:
        if self._state == self._read_name:
            self._text = OPEN + self._head + self._text
        elif self._state != self._start:
            self._text = ""
        super()._end()
