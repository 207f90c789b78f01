"""Prevents the text of chat messages from being read as control tokens.

A chat template writes control tokens, such as the start of a turn, into the prompt. A message may
contain the text of a control token. If the prompt were tokenized as a whole, the author of the
message could thus write turns of another role. The text of a control token in a message is
therefore replaced by a placeholder character before the template is rendered. Afterwards, the
original text is put back and tokenized as ordinary text.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_PRIVATE_USE = range(0xF0000, 0xFFFFE)
"""Placeholders are private-use characters of Unicode (Supplementary Private Use Area-A)."""


class Segment(NamedTuple):
    """A part of a rendered prompt."""

    text: str
    # True if everything in `text` is ordinary text, even if it looks like a control token.
    is_plain: bool


@dataclass(frozen=True, slots=True)
class Masked:
    """Messages whose control tokens were replaced, and the original text of each placeholder."""

    messages: Sequence[Mapping[str, Any]]
    placeholders: Mapping[str, str]  # original text of each placeholder character

    def segments(self, prompt: str, control: "ControlTokens") -> Iterator[Segment]:
        """Split a prompt that was rendered from `messages`, and restore the original text.

        Each plain segment begins and ends at a control token of the template, or at an end of the
        prompt. The text of a message is thus tokenized in one piece.
        """
        pieces = re.split(f"([{''.join(self.placeholders)}])", prompt)
        plain: list[str] = []
        for piece in pieces:
            if piece in self.placeholders:
                plain.append(self.placeholders[piece])
                continue
            found = list(control.pattern.finditer(piece))
            if not found:
                plain.append(piece)
                continue
            first, last = found[0].start(), found[-1].end()
            yield from _plain(plain, piece[:first])
            yield Segment(piece[first:last], is_plain=False)
            plain = [piece[last:]]
        yield from _plain(plain, "")


def _plain(texts: Sequence[str], rest: str) -> Iterator[Segment]:
    text = "".join(texts) + rest
    if text:
        yield Segment(text, is_plain=True)


class ControlTokens:
    """The texts of a tokenizer's control tokens.

    Args:
        texts: the texts. Empty texts are ignored.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted(filter(None, texts), key=len, reverse=True)
        # If there are no control tokens, the pattern must match nothing.
        self.pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def occur_in(self, value: object) -> bool:
        """Return whether any string in `value` contains the text of a control token.

        Args:
            value: a string, or nested lists and mappings of strings.
        """
        return any(self.pattern.search(text) for text in _strings(value))

    def mask(self, messages: Sequence[Mapping[str, Any]]) -> Masked | None:
        """Replace the control tokens in all strings of `messages`.

        Return None if the strings contain no control tokens.

        Each control token is replaced by a character that occurs nowhere in `messages`.
        """
        strings = list(_strings(messages))
        found = {match.group() for text in strings for match in self.pattern.finditer(text)}
        if not found:
            return None
        used = set().union(*strings)
        free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
        names = dict(zip(sorted(found), free, strict=False))
        masked = _replace(messages, lambda text: self.pattern.sub(lambda m: names[m.group()], text))
        return Masked(masked, {name: text for text, name in names.items()})


def _strings(value: object) -> Iterator[str]:
    match value:
        case str():
            yield value
        case Mapping():
            for key, item in value.items():
                yield from _strings(key)
                yield from _strings(item)
        case Sequence():
            for item in value:
                yield from _strings(item)


def _replace(value: Any, change: Any) -> Any:
    match value:
        case str():
            return change(value)
        case Mapping():
            return {change(key): _replace(item, change) for key, item in value.items()}
        case Sequence():
            return [_replace(item, change) for item in value]
        case _:
            return value
