"""The protocol of parsers, which split the text of an answer into content, reasoning and calls."""

from collections.abc import Iterable
from typing import Final, NamedTuple, Protocol

CONTENT: Final = "content"
REASONING: Final = "reasoning"
CALL: Final = "call"
ARGUMENTS: Final = "arguments"


class Piece(NamedTuple):
    """New text of one kind.

    Attributes:
        kind: `CONTENT`, `REASONING`, `CALL` (the text is the name of a function that is called) or
            `ARGUMENTS` (the text continues the JSON of the call's arguments).
        text: the text, which is never empty.
        call: index of the call in the answer, for `CALL` and `ARGUMENTS`.
        call_id: id that the model gave the call, for `CALL`; empty if its format has no ids.
    """

    kind: str
    text: str
    call: int = 0
    call_id: str = ""


class OutputParser(Protocol):
    """A parser of one answer, fed with the text as it arrives.

    The concatenated texts of each kind (and call) depend only on the whole answer. They are the
    same however the answer is split into calls of `feed`.
    """

    def feed(self, text: str) -> list[Piece]:
        """Append text; return the pieces that later text cannot change."""
        ...

    def finish(self) -> list[Piece]:
        """Return the pieces of held-back text, at the end of the answer."""
        ...


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge neighboring pieces of the same kind and call; never merge two `CALL` pieces."""
    found: list[Piece] = []
    for piece in pieces:
        last = found[-1] if found else None
        if last is not None and piece.kind != CALL and _key(last) == _key(piece):
            found[-1] = last._replace(text=last.text + piece.text)
        else:
            found.append(piece)
    return found


def _key(piece: Piece) -> tuple[str, int]:
    return piece.kind, piece.call
