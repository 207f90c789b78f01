"""Parse whole answers, split in every way, and collect the resulting pieces."""

import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from penstock.router.parsers.pieces import (
    ARGUMENTS,
    CALL,
    CONTENT,
    REASONING,
    OutputParser,
    Piece,
    merged,
)


@dataclass(frozen=True)
class Answer:
    """The text of an answer by kind, and its calls as pairs (name, text of the arguments)."""

    content: str
    calls: Sequence[tuple[str, str]] = ()
    reasoning: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "calls", list(self.calls))


def parse(parser: OutputParser, texts: Iterable[str]) -> list[Piece]:
    """Return the pieces of an answer that arrives as `texts`."""
    pieces = [piece for text in texts for piece in parser.feed(text)]
    return merged([*pieces, *parser.finish()])


def answer_of(pieces: Sequence[Piece]) -> Answer:
    """Combine all pieces of an answer; check that each call begins before its arguments."""
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for piece in pieces:
        assert piece.text, pieces
        if piece.kind == CALL:
            assert piece.call == len(names), pieces
            names[piece.call], arguments[piece.call] = piece.text, ""
        elif piece.kind == ARGUMENTS:
            assert piece.call == len(names) - 1, pieces
            arguments[piece.call] += piece.text
    kinds = {
        kind: "".join(piece.text for piece in pieces if piece.kind == kind)
        for kind in (CONTENT, REASONING)
    }
    calls = [(names[call], arguments[call]) for call in sorted(names)]
    return Answer(kinds[CONTENT], calls, kinds[REASONING])


def in_bytes(text: str) -> Iterator[str]:
    """Yield the pieces of a text that is decoded byte by byte."""
    decoder: Any = codecs.getincrementaldecoder("utf-8")()
    for byte in text.encode():
        yield decoder.decode(bytes([byte]))


def in_tokens(text: str, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the pieces of a text that is decoded token by token."""
    decoder: Any = codecs.getincrementaldecoder("utf-8")()
    encoded = tokenizer.encode(text, add_special_tokens=False)
    at = 0
    for _, end in encoded.offsets:
        if end > at:  # some tokens do not complete a character
            yield decoder.decode(text[at:end].encode())
            at = end
    yield text[at:]


def splits(text: str, tokenizer: Tokenizer) -> Iterator[list[str]]:
    """Yield a text whole, byte by byte, token by token, and split in two at each character."""
    yield [text]
    yield list(text)
    yield list(in_bytes(text))
    yield list(in_tokens(text, tokenizer))
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]


def check_splits(make: Callable[[], OutputParser], text: str, tokenizer: Tokenizer) -> Answer:
    """Parse a text in all splits, which must give the same pieces; return the answer."""
    first, *others = splits(text, tokenizer)
    expected = parse(make(), first)
    for split in others:
        assert "".join(split) == text
        found = parse(make(), split)
        assert found == expected, split
    return answer_of(expected)
