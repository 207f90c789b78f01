"""Assigns the tokens of an answer to the kinds of its text: reasoning, content or calls."""

import codecs
from collections.abc import Iterator, Sequence
from typing import Any

from penstock.common.text.token_bytes import TokenBytes
from penstock.router.parsers.pieces import CONTENT, REASONING, Piece
from penstock.router.requests.response_stream import Delta

UTF8 = codecs.getincrementaldecoder("utf-8")


class TokenTexts:
    """Splits the texts of deltas, which may have several tokens, into the texts of the tokens.

    Args:
        token_bytes: the bytes of the model's tokens.
        shown: special tokens that the text contains.
    """

    def __init__(self, token_bytes: TokenBytes, shown: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._hidden = token_bytes.special - shown
        self._decoder = UTF8("replace")
        self._next = 0  # position of the first token that `_decoder` has not read

    def split(self, delta: Delta) -> Iterator[str]:
        """Yield the text of each token; the last token has the rest of the delta's text."""
        if delta.position != self._next:
            self._decoder.reset()
        self._next = delta.position + len(delta.tokens)
        start, last = 0, len(delta.tokens) - 1
        for index, token in enumerate(delta.tokens):
            piece = b"" if token in self._hidden else self._token_bytes.bytes_of(token)
            end = start + len(self._decoder.decode(piece))
            yield delta.text[start:] if index == last else delta.text[start:end]
            start = end


class TokenKinds:
    """Counts the tokens of the reasoning, and finds the log probabilities of the content.

    The text of some tokens is held back, or is part of a tag. Such a token has no piece of its own
    and is counted with the next piece. After reasoning, it is counted with the reasoning instead,
    because it marks the end of the reasoning.

    Attributes:
        num_reasoning: number of tokens that belong to the reasoning.
    """

    def __init__(self) -> None:
        self.num_reasoning = 0
        self._num_waiting = 0  # tokens since the last piece, which belong to no piece yet
        self._waiting: list[Any] = []  # log probabilities of the tokens since the last piece
        self._last = ""  # kind of the last piece

    def add(self, pieces: Sequence[Piece], num_tokens: int = 1) -> None:
        """Count a token that has added `pieces`."""
        if not pieces:
            self._num_waiting += num_tokens
            return
        if pieces[0].kind == REASONING:
            self.num_reasoning += self._num_waiting + num_tokens
        elif self._last == REASONING:
            self.num_reasoning += self._num_waiting
        self._num_waiting = 0
        self._last = pieces[-1].kind

    def content_entries(self, pieces: Sequence[Piece], entries: Sequence[Any]) -> Sequence[Any]:
        """Return the log probabilities that belong to the content in `pieces`.

        Call this before `add`.

        Args:
            pieces: the pieces that a token, or the end of the answer, has added.
            entries: the log probabilities of this token, if any.
        """
        if not pieces:
            self._waiting.extend(entries)
            return ()
        found: Sequence[Any] = ()
        if any(piece.kind == CONTENT for piece in pieces):
            is_after = self._last == REASONING or pieces[0].kind != CONTENT
            found = entries if is_after else [*self._waiting, *entries]
        self._waiting.clear()
        return found

    def finish(self) -> None:
        """Count the tokens at the end of the answer that no piece contains."""
        if self._last == REASONING:
            self.num_reasoning += self._num_waiting
        self._num_waiting = 0
