"""Reasoning between two tags at the start of an answer, such as `<think>...</think>`."""

from dataclasses import dataclass

from penstock.router.parsers.pieces import CONTENT, REASONING
from penstock.router.parsers.reader import Reader


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of a family of models.

    Attributes:
        start: begins the reasoning.
        end: ends the reasoning.
        is_open: if True, the reasoning of a new message has begun unless the prompt ends with the
            end tag. If False, the reasoning has begun if the start tag is at the end of the prompt
            or at the start of the answer.
        start_token: special token with which `start` begins, if text follows it within `start`.
    """

    start: str
    end: str
    is_open: bool = False
    start_token: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts of the tags that may be special tokens."""
        return self.start_token or self.start, self.end

    def are_open(self, prompt_end: str, continues_message: bool = False) -> bool:
        """Return whether an answer begins with reasoning.

        Args:
            prompt_end: text at the end of the prompt.
            continues_message: whether the answer continues the last message of the prompt.
        """
        text = prompt_end.rstrip()
        if text.endswith(self.start):
            return True
        return self.is_open and not continues_message and not text.endswith(self.end)

    def are_closed(self, prompt_end: str) -> bool:
        """Return whether the reasoning has already ended, given the end of the prompt's text."""
        return prompt_end.rstrip().endswith(self.end)


class ThinkParser(Reader):
    """Parses one answer; white space next to the tags is left out.

    Args:
        tags: the tags.
        is_open: whether the answer begins with reasoning, without the start tag.
    """

    def __init__(self, tags: Tags, is_open: bool) -> None:
        super().__init__()
        self._tags = tags
        self._is_open = is_open
        self._has_text = False

    def _start(self) -> bool:
        rest = self._text.lstrip()
        start = self._tags.start
        if not self._is_ended and (not rest or (start.startswith(rest) and rest != start)):
            return False
        has_tag = rest.startswith(start)
        if has_tag:
            self._text = rest[len(start) :]
        self._state = self._read_reasoning if has_tag or self._is_open else self._read_content
        return True

    def _read_reasoning(self) -> bool:
        text, marker = self._until(self._tags.end)
        text = self._space + text
        if not self._has_text:
            text = text.lstrip()
        end = len(text.rstrip())
        self._space = "" if marker else text[end:]
        self._has_text |= end > 0
        self._add(REASONING, text[:end])
        if marker:
            self._state = self._skip_space
        return marker is not None

    def _skip_space(self) -> bool:
        if not self._skip():
            return False
        self._state = self._read_content
        return True

    def _read_content(self) -> bool:
        self._add(CONTENT, self._text)
        self._text = ""
        return False

    def _end(self) -> None:
        if self._state == self._start:
            self._add(REASONING if self._is_open else CONTENT, self._text)
        self._text = self._space = ""
