"""Finds stop strings in a text that grows.

Each stop string has a Knuth-Morris-Pratt automaton. The state of the automaton is the length of the
longest prefix of the stop string that is a suffix of the text. Text that may still become a match
is held back.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Matched:
    """A stop string that was found, with its range `[start, end)` in the text.

    Both offsets count from the start of the held-back text, which the new text follows.
    """

    stop: str
    start: int
    end: int


class Pattern:
    """The automaton of one stop string.

    Attributes:
        text: the stop string.
        held: length of the longest prefix of the stop string that is a suffix of the text so far.
    """

    __slots__ = ("_borders", "held", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.held = 0
        self._borders = _borders(text)

    def feed(self, text: str) -> int | None:
        """Advance the automaton over `text`.

        Return the offset in `text` at which the first match ends, or None if there is no match.
        """
        pattern, borders, held = self.text, self._borders, self.held
        for offset, char in enumerate(text):
            while held and pattern[held] != char:
                held = borders[held - 1]
            if pattern[held] == char:
                held += 1
                if held == len(pattern):
                    return offset + 1
        self.held = held
        return None


@lru_cache(maxsize=64)
def _borders(pattern: str) -> Sequence[int]:
    """Return, for each prefix of `pattern`, the length of its longest proper border.

    A border of a text is a prefix of it that is also a suffix. The result is the failure function
    of Knuth, Morris and Pratt. It is cached, because all choices of a call use the same patterns.
    """
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders


class StopMatcher:
    """Finds the stop string that ends first in a text.

    If several stop strings end at the same place, the longest one is found. The result depends only
    on the text, however it is split into calls.

    Args:
        stops: the stop strings, each with at least one character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [Pattern(stop) for stop in dict.fromkeys(stops)]
        self._held = ""

    def feed(self, text: str) -> tuple[str, Matched | None]:
        """Append text. Return the text that can be shown now, and the match or None.

        If a stop string matches, the returned text is the held-back text plus `text`. The offsets
        of the match refer to the returned text.
        """
        before = len(self._held)
        whole = self._held + text
        best: Matched | None = None
        for pattern in self._patterns:
            offset = pattern.feed(text)
            if offset is not None:
                end = before + offset
                found = Matched(pattern.text, end - len(pattern.text), end)
                if best is None or (found.end, found.start) < (best.end, best.start):
                    best = found
        if best is not None:
            self._held = ""
            return whole, best
        keep = max(pattern.held for pattern in self._patterns) if self._patterns else 0
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def rest(self) -> str:
        """Return the held-back text and clear it.

        Call this when an answer has ended without a match.
        """
        held, self._held = self._held, ""
        return held
