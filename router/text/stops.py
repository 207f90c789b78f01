"""Stop strings, matched over text as it grows.

Each stop string is followed by an automaton (Knuth, Morris, Pratt): its state is the length of the
longest beginning of the string that the text ends with. Text that may still become a match is held
back.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Matched:
    """A stop string found: it covers `[start, end)` of what was held back and what was fed."""

    stop: str
    start: int
    end: int


class Pattern:
    """One stop string and how much of it the text ends with."""

    __slots__ = ("_borders", "held", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.held = 0  # characters of the stop string that the text ends with
        self._borders = _borders(text)

    def feed(self, text: str) -> int | None:
        """Follow `text`; the offset just behind the first match in it, or None."""
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


def _borders(pattern: str) -> list[int]:
    """For each prefix of `pattern`: how long its longest proper prefix is that is its suffix."""
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
    """Finds the stop string that is complete first; of several complete at once, the longest.

    What it finds is a function of the text alone, however the text was cut when fed.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [Pattern(stop) for stop in dict.fromkeys(stops)]
        self._held = ""

    def feed(self, text: str) -> tuple[str, Matched | None]:
        """New text in; the text that is safe to show out, or all text and the match in it."""
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
            return whole, best
        keep = max(pattern.held for pattern in self._patterns) if self._patterns else 0
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep], None

    def rest(self) -> str:
        """The text still held back: the answer ended without a match."""
        held, self._held = self._held, ""
        return held
