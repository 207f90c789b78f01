"""Calls in Python's syntax: the answer is `[add(a=1, b="x"), now()]`.

Llama 3.2 and 4, and Gemma 3 with a suitable template, write this form. Llama 4 writes it between
`<|python_start|>` and `<|python_end|>`.
"""

import json
import re
from collections.abc import Sequence

from penstock.common.argument_notation import ArgumentNotation
from penstock.router.parsers.reader import Reader
from penstock.router.parsers.tools.call_grammar import CallForm, CallGrammar, is_short
from penstock.router.parsers.tools.python_value import PythonSpan, value_as_json
from penstock.router.parsers.tools.tool_parameters import ToolParameters

BEGIN, END = "<|python_start|>", "<|python_end|>"
# The pattern limits the length of a name, because it is matched again at every token.
NAME = re.compile(r"[A-Za-z_][\w.-]{0,255}")
MAX_KEY_CHARS = 300  # limit for the name of an argument, including white space


class PythonicParser(Reader):
    """Parses one answer; an answer that does not begin with a call is content.

    Args:
        strict_tools: tools whose calls are constrained by the grammar of `call_forms`. A call
            without a marker is read as a call only if it calls one of these tools. None: any tool.
    """

    markers = (BEGIN, END)

    @classmethod
    def call_forms(cls, grammar: CallGrammar) -> Sequence[CallForm]:
        call = grammar.each(lambda name, arguments: f'"{name}(" {arguments} ")"')
        others = grammar.more(f"/, ?/ {call}") + ' "]"'
        end = f"( {grammar.marker(END)} )?"
        tagged = CallForm(BEGIN, f'SPACE "[" {call} {others} {end}')
        return [tagged, *grammar.firsts(lambda name: f"[{name}(", f'")" {others} {end}')]

    @classmethod
    def notation(cls, grammar: CallGrammar) -> ArgumentNotation:
        return ArgumentNotation("keywords")

    def __init__(self, strict_tools: ToolParameters | None = None) -> None:
        super().__init__()
        self._strict_tools = strict_tools
        self._has_marker = False
        self._raw = ""  # text that becomes content if it turns out not to be a call
        self._name = ""
        self._key = ""
        self._value = ""
        self._span = PythonSpan()
        self._num_arguments = 0

    def _start(self) -> bool:
        rest = self._text.lstrip()
        if not rest:
            return False
        is_begin = rest.startswith(BEGIN)
        if BEGIN.startswith(rest) and not is_begin and not self._is_ended:
            return False
        after = rest[len(BEGIN) :].lstrip() if is_begin else rest
        if not after and not self._is_ended:
            return False
        if not after.startswith("["):
            self._text = after if is_begin else self._text
            self._state = self._read_content
            return True
        spaces = self._text[: len(self._text) - len(rest)]
        if self._strict_tools is not None and not is_begin:
            # The grammar constrains only calls whose name directly follows the bracket.
            if len(after) == 1 and not self._is_ended:
                return False
            if not is_short(spaces) or after[1:2].isspace():
                self._state = self._read_content
                return True
        self._has_marker = is_begin
        self._text, self._raw = after[1:], spaces + "["
        self._state = self._before_call
        return True

    def _read_content(self) -> bool:
        text, marker = self._until(BEGIN, END)
        self._add_content(text)
        if marker == BEGIN:
            self._state = self._start
        return marker is not None

    def _before_call(self) -> bool:
        rest = self._text.lstrip()
        self._take_raw(len(self._text) - len(rest))
        self._name = ""
        self._num_arguments = 0
        self._state = self._read_name
        return bool(rest)

    def _read_name(self) -> bool:
        end = self._text.find("(")
        name = self._name + (self._text if end < 0 else self._text[:end])
        if (name and not NAME.fullmatch(name)) or (end >= 0 and not name):
            return self._fail()
        strict = self._strict_tools
        if strict is not None and end >= 0 and not self._has_marker and not strict.has(name):
            return self._fail()
        self._name = name
        self._take_raw(len(self._text) if end < 0 else end + 1)
        if end >= 0:
            self._key = ""
            self._state = self._read_key
        return end >= 0

    def _read_key(self) -> bool:
        """Read an argument's name with its equals sign, or the end of the call."""
        if not self._key:
            rest = self._text.lstrip()
            self._take_raw(len(self._text) - len(rest))
            if not rest:
                return False
            if rest[0] == ")":
                self._take_raw(1)
                self._certain()
                self._add_arguments("{}" if self._num_arguments == 0 else "}")
                self._state = self._after_call
                return True
        end = self._text.find("=")
        key = self._key + (self._text if end < 0 else self._text[:end])
        if len(key) > MAX_KEY_CHARS or not NAME.fullmatch(key.strip()):
            return self._fail()
        self._key = key
        self._take_raw(len(self._text) if end < 0 else end + 1)
        if end >= 0:
            self._certain()
            opening = "{" if self._num_arguments == 0 else ", "
            self._add_arguments(f"{opening}{json.dumps(key.strip())}: ")
            self._num_arguments += 1
            self._span, self._value = PythonSpan(), ""
            self._state = self._read_value
        return end >= 0

    def _read_value(self) -> bool:
        used = self._span.feed(self._text)
        self._value += self._text[:used]
        self._text = self._text[used:]
        if not self._span.is_ended:
            return False
        self._add_arguments(value_as_json(self._value.strip()))
        if self._text[0] == ",":
            self._text = self._text[1:]
        elif self._text[0] != ")":
            return self._fail()
        self._key = ""
        self._state = self._read_key
        return True

    def _after_call(self) -> bool:
        if not self._skip(" \t\r\n,"):
            return False
        self._raw = ""
        if self._text[0] == "]":
            self._text = self._text[1:]
            self._state = self._read_content
        else:
            self._state = self._before_call
        return True

    def _certain(self) -> None:
        """Begin the call, unless it has begun.

        The text is certain to be a call now.
        """
        if self._num_arguments == 0:
            self._add_call(self._name)
        self._raw = ""

    def _fail(self) -> bool:
        """Read the rest of the answer as content."""
        if self._num_arguments:
            self._add_arguments("}")
        self._add_content(self._raw)
        self._raw = ""
        self._state = self._read_content
        return True

    def _take_raw(self, count: int) -> None:
        self._raw += self._text[:count]
        self._text = self._text[count:]

    def _end(self) -> None:
        if self._state == self._read_value or (
            self._state == self._read_key and self._num_arguments
        ):
            # The rest of a call that has begun cannot be content, so drop it.
            self._text = self._raw = ""
        self._text, self._raw = self._raw + self._text, ""
        super()._end()
