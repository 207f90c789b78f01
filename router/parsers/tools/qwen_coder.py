"""Calls of Qwen3-Coder and later models of Qwen: the arguments are between tags.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Models sometimes forget `<tool_call>` or an end tag. Therefore `<function=NAME>` may begin a call
without `<tool_call>` if a tool has this name. A value, a call or a block without an end tag ends at
the next tag.
"""

import re
from collections.abc import Sequence

from penstock.common.argument_notation import ArgumentNotation
from penstock.router.parsers.tools.call_grammar import CallForm, CallGrammar
from penstock.router.parsers.tools.tagged_arguments import NAME, TaggedArgumentsParser
from penstock.router.parsers.tools.tool_parameters import ToolParameters

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
# The pattern limits the length of a name, because it is matched again at every token.
KEY = re.compile(r"[^<>\n]{1,256}")


class QwenCoderParser(TaggedArgumentsParser):
    """Parses one answer of Qwen3-Coder.

    If the text after an opening tag is not a tool call, the tag and the text are content.
    """

    markers = (OPEN, CLOSE)
    strips_newlines = True

    @classmethod
    def call_forms(cls, grammar: CallGrammar) -> Sequence[CallForm]:
        call = grammar.each(lambda name, arguments: f'"{name}>" {arguments} "\\n</function>"')
        end = f"SPACE {grammar.marker(CLOSE)}"
        return [
            CallForm(OPEN, f'SPACE "{FUNCTION}" {call} {end}'),
            CallForm(FUNCTION, f"{call} ( {end} )?"),
        ]

    @classmethod
    def notation(cls, grammar: CallGrammar) -> ArgumentNotation:
        return ArgumentNotation(
            "tagged",
            before_key=f'"\\n{PARAMETER}"',
            before_value='">\\n"',
            end=f"\n{PARAMETER_END}",
            markers=(PARAMETER_END, PARAMETER, FUNCTION_END),
        )

    def __init__(self, tools: ToolParameters | None = None) -> None:
        super().__init__(tools)
        self._opened = ""  # text that becomes content if no call follows
        self._is_in_block = False

    def _start(self) -> bool:
        text, marker = self._until(OPEN, FUNCTION)
        self._add_content(text)
        if marker:
            self._open(marker)
        return marker is not None

    def _open(self, marker: str) -> None:
        """Read the text after `<tool_call>` or `<function=`."""
        self._opened = marker
        self._is_in_block |= marker == OPEN
        self._state = self._read_function if marker == OPEN else self._read_name

    def _read_function(self) -> bool:
        rest = self._text.lstrip()
        if not rest:
            return False
        if rest.startswith(FUNCTION):
            self._opened += self._text[: len(self._text) - len(rest)] + FUNCTION
            self._text = rest[len(FUNCTION) :]
            self._state = self._read_name
            return True
        return False if FUNCTION.startswith(rest) and not self._is_ended else self._fail()

    def _read_name(self) -> bool:
        name, bracket, rest = self._text.partition(">")
        is_name = NAME.fullmatch(name) is not None
        if not bracket and is_name and not self._is_ended:
            return False
        if not (bracket and is_name and (self._is_in_block or self._tools.has(name))):
            return self._fail()
        self._text = rest
        self._begin_call(name)
        self._state = self._between
        return True

    def _fail(self) -> bool:
        """Add the opening tags as content, and search the text after the tags for calls."""
        self._is_in_block = False
        self._add_content(self._opened)
        self._state = self._start
        return True

    def _between(self) -> bool:
        """Skip the text between parameters."""
        _, marker = self._until(PARAMETER, FUNCTION_END, CLOSE, OPEN)
        if marker == PARAMETER:
            self._state = self._read_key
        elif marker:
            self._end_call()
            self._after_call(marker)
        return marker is not None

    def _read_key(self) -> bool:
        key, bracket, rest = self._text.partition(">")
        if not KEY.fullmatch(key):
            self._state = self._between
            return True
        if not bracket:
            return False
        self._text = rest
        self._begin_value(key.strip())
        self._state = self._read_value
        return True

    def _read_value(self) -> bool:
        text, marker = self._until(PARAMETER_END, PARAMETER, FUNCTION_END)
        self._continue_value(text)
        if marker is None:
            return False
        self._end_value()
        self._state = self._read_key if marker == PARAMETER else self._between
        if marker == FUNCTION_END:
            self._end_call()
            self._after_call(marker)
        return True

    def _after_call(self, marker: str) -> None:
        if marker == OPEN:
            self._open(marker)
        else:
            self._is_in_block &= marker != CLOSE
            self._state = self._start if marker == CLOSE else self._close

    def _close(self) -> bool:
        """Skip `</tool_call>` if the next text is this tag."""
        if not self._skip():
            return False
        found = self._starts_with(CLOSE)
        if found is not None:
            self._is_in_block &= not found
            self._state = self._start
        return found is not None

    def _end(self) -> None:
        if self._state in (self._read_function, self._read_name):
            self._text = self._opened + self._text
        elif self._state != self._start:
            self._text = ""
        super()._end()
