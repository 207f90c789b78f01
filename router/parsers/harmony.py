"""Messages in channels, as gpt-oss writes them (OpenAI's format "harmony").

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...

The prompt ends with `<|start|>assistant`, or with the text of a message that the answer continues.
The channel `analysis` is reasoning. A message whose header contains `to=functions.NAME` is a tool
call. All other messages are content.
"""

import re

from penstock.router.parsers.pieces import ARGUMENTS, CONTENT, REASONING
from penstock.router.parsers.reader import Reader

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, RETURN, CALL, CONSTRAIN = "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"
RECIPIENT = re.compile(r"\bto=([^\s<]+)")
NAME = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
FUNCTIONS = "functions."
ROLE = "assistant"


def begins_message(prompt_end: str) -> bool:
    """Return whether an answer begins with the header of a message, given its prompt's end."""
    return prompt_end.rstrip().endswith(START + ROLE)


class HarmonyParser(Reader):
    """Splits one answer into reasoning, content and tool calls.

    Args:
        is_in_content: whether the answer begins within the text of a message that is content. If
            not, the answer begins with the header of a message.
    """

    markers = (START, CHANNEL, MESSAGE, END, RETURN, CALL, CONSTRAIN)

    def __init__(self, is_in_content: bool = False) -> None:
        super().__init__()
        if is_in_content:
            self._state = self._read_message
        self._header = ""
        self._kind = CONTENT
        self._is_empty = True  # the message has no text yet
        self._has_text = {CONTENT: False, REASONING: False}

    def _start(self) -> bool:
        """Read the header of a message."""
        text, marker = self._until(MESSAGE)
        self._header += text
        if marker:
            self._begin_message(self._header)
            self._state = self._read_message
        return marker is not None

    def _begin_message(self, header: str) -> None:
        recipient, channel = RECIPIENT.search(header), NAME.search(header)
        self._is_empty = True
        if recipient and recipient[1].startswith(FUNCTIONS) and recipient[1] != FUNCTIONS:
            self._kind = ARGUMENTS
            self._add_call(recipient[1].removeprefix(FUNCTIONS))
        elif recipient or (channel and channel[1] == "analysis"):
            self._kind = REASONING  # calls of built-in tools also count as reasoning
        else:
            self._kind = CONTENT

    def _read_message(self) -> bool:
        text, marker = self._until(END, RETURN, CALL, START, CHANNEL)
        if text:
            self._add_text(text)
        if marker:
            if self._kind == ARGUMENTS and self._is_empty:
                self._add_arguments("{}")
            self._header = marker if marker == CHANNEL else ""
            self._state = self._start
        return marker is not None

    def _add_text(self, text: str) -> None:
        if self._kind == ARGUMENTS:
            self._add_arguments(text)
        else:
            if self._is_empty and self._has_text[self._kind]:
                self._add(self._kind, "\n")  # a newline separates two messages of the same kind
            self._has_text[self._kind] = True
            self._add(self._kind, text)
        self._is_empty = False

    def _end(self) -> None:
        if self._state == self._read_message and self._kind == ARGUMENTS and self._is_empty:
            self._add_arguments("{}")
        is_text = self._state == self._start and not any(
            each in self._header for each in self.markers
        )
        if is_text and not any(self._has_text.values()) and not self._num_calls:
            self._add(CONTENT, self._header)  # an answer without any header is content
        self._text = ""
