"""Base class of parsers: a state machine that reads an answer as it arrives."""

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeAlias

from penstock.common.argument_notation import JSON, ArgumentNotation
from penstock.router.parsers.pieces import ARGUMENTS, CALL, CONTENT, Piece
from penstock.router.parsers.tools.call_grammar import CallForm, CallGrammar

State: TypeAlias = Callable[[], bool]
"""A state: a method that reads some unread text, and returns False if it needs more text first."""

NOT_SPACE = re.compile(r"\S")


@cache
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


@cache
def _starts(markers: tuple[str, ...]) -> tuple[int, tuple[str, ...]]:
    """Return how many characters may be held back, and the first characters of the markers.

    Markers of one character are never held back.
    """
    firsts = {marker[0] for marker in markers if len(marker) > 1}
    return max(map(len, markers)) - 1, tuple(sorted(firsts))


def held_length(text: str, markers: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text` that may be the start of a marker."""
    most, firsts = _starts(markers)
    end = text[-most:] if most else ""
    if not any(first in end for first in firsts):  # usual case: no marker begins near the end
        return 0
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


class Reader:
    """Reads an answer as a state machine; `_state` is the method that reads the next text.

    A state decides only if later text cannot change the decision. The result therefore does not
    depend on how the answer is divided into calls of `feed`. White space next to tool calls is left
    out.
    """

    def __init__(self) -> None:
        self._text = ""  # text that was not read yet
        self._is_ended = False
        self._num_calls = 0
        self._follows_call = False  # whether no content has followed the last call
        self._space = ""  # white space that is content only if more content follows
        self._pieces: list[Piece] = []
        self._state: State = self._start

    @classmethod
    def call_forms(cls, grammar: CallGrammar) -> Sequence[CallForm]:
        """Return the forms of calls whose arguments a grammar can constrain, if there are any."""
        return ()

    @classmethod
    def notation(cls, grammar: CallGrammar) -> ArgumentNotation:
        """Return the notation in which calls that match `call_forms` write their arguments."""
        return JSON

    def feed(self, text: str) -> list[Piece]:
        """Append text; return the pieces that later text cannot change."""
        self._text += text
        return self._run()

    def finish(self) -> list[Piece]:
        """Return the pieces of held-back text, at the end of the answer."""
        self._is_ended = True
        self._run_states()
        self._end()
        if self._space and not self._num_calls:
            self._add(CONTENT, self._space)
            self._space = ""
        return self._taken()

    def _start(self) -> bool:
        """Read the start of the answer."""
        raise NotImplementedError

    def _end(self) -> None:
        """Read the remaining text at the end of the answer; by default, it is content."""
        self._add_content(self._text)
        self._text = ""

    def _run(self) -> list[Piece]:
        self._run_states()
        return self._taken()

    def _run_states(self) -> None:
        while self._text and self._state():
            pass

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # ------------------------------------------------------------ reading

    def _until(self, *markers: str) -> tuple[str, str | None]:
        """Take the text before the first marker, and the marker.

        If no marker is found, take the text that cannot be part of a marker, and return None as the
        marker. No marker may be a prefix of another.
        """
        found = _pattern(markers).search(self._text)
        if found is not None:
            text, self._text = self._text[: found.start()], self._text[found.end() :]
            return text, found.group()
        keep = 0 if self._is_ended else held_length(self._text, markers)
        end = len(self._text) - keep
        text, self._text = self._text[:end], self._text[end:]
        return text, None

    def _starts_with(self, marker: str) -> bool | None:
        """Take `marker` from the start of the unread text and return whether it was there.

        Returns None if only later text can show whether the text begins with the marker.
        """
        if self._text.startswith(marker):
            self._text = self._text[len(marker) :]
            return True
        return None if not self._is_ended and marker.startswith(self._text) else False

    def _skip(self, characters: str | None = None) -> bool:
        """Skip `characters`, by default white space; return whether text is left."""
        self._text = self._text.lstrip(characters)
        return bool(self._text)

    # ------------------------------------------------------------ writing

    def _add(self, kind: str, text: str, call: int = 0, call_id: str = "") -> None:
        if text:
            self._pieces.append(Piece(kind, text, call, call_id))

    def _add_content(self, text: str) -> None:
        """Add content; white space at its end is held back until more content follows."""
        text = self._space + text
        end = len(text.rstrip())
        self._space = text[end:]
        if end:
            start = len(text) - len(text.lstrip()) if self._follows_call else 0
            self._follows_call = False
            self._add(CONTENT, text[start:end])

    def _add_call(self, name: str, call_id: str = "") -> None:
        """Begin a call; `_add_arguments` then adds the text of its arguments."""
        self._space = ""
        self._follows_call = True
        self._add(CALL, name, self._num_calls, call_id)
        self._num_calls += 1

    def _add_arguments(self, text: str) -> None:
        self._add(ARGUMENTS, text, self._num_calls - 1)
