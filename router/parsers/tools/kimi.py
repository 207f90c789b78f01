"""Calls of Kimi K2: an id that contains the name, and JSON, between the model's special tokens.

    SECTION_BEGIN CALL_BEGIN functions.NAME:INDEX ARGUMENT_BEGIN {...} CALL_END ... SECTION_END

The index counts the calls of the conversation. Prompts of later requests repeat the model's id of
the call, so the API returns the same id.
"""

import re

from penstock.router.parsers.tools.deepseek import DeepSeekV31Parser

SECTION_BEGIN, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL_BEGIN, CALL_END = "<|tool_call_begin|>", "<|tool_call_end|>"
ARGUMENT_BEGIN = "<|tool_call_argument_begin|>"
ID = re.compile(r"(?:functions\.)?(?P<name>[\w.:/-]{1,128}?)(?P<index>:\d{1,9})?", re.ASCII)


class KimiParser(DeepSeekV31Parser):
    """Parses one answer of Kimi K2."""

    calls_begin, calls_end, separator = SECTION_BEGIN, SECTION_END, ARGUMENT_BEGIN
    call_begin, call_end = CALL_BEGIN, CALL_END
    markers = (SECTION_BEGIN, SECTION_END, CALL_BEGIN, CALL_END, ARGUMENT_BEGIN)

    def __init__(self) -> None:
        super().__init__()
        self._ids: set[str] = set()

    @classmethod
    def _call_form(cls, separator: str, name: str, arguments: str) -> str:
        return f'"functions.{name}:" /[0-9]{{1,4}}/ {separator} SPACE {arguments}'

    def _begin(self, name: str, call_id: str = "") -> None:
        given = name.strip()
        found = ID.fullmatch(given)
        if found is None:
            super()._begin("")
            return
        # Keep the model's id only if it has an index and no earlier call of the answer has the same
        # id.
        is_id = found["index"] is not None and given not in self._ids
        self._ids.add(given)
        super()._begin(found["name"], given if is_id else "")
