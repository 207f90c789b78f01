"""Offsets of tokens in a text, where a token may end within a character."""

import codecs

UTF8 = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """Computes the offset of each token in a text, in characters, as tokens are added.

    A token that begins within a character has the offset of that character.
    """

    def __init__(self) -> None:
        self._decoder = UTF8("replace")
        self._num_chars = 0

    def add(self, token: bytes) -> int:
        """Add the bytes of the next token and return the token's offset."""
        offset = self._num_chars
        self._num_chars += len(self._decoder.decode(token))
        return offset

    def copy(self) -> "TextOffsets":
        """Return an independent copy that continues at the current offset."""
        other = TextOffsets()
        other._decoder.setstate(self._decoder.getstate())
        other._num_chars = self._num_chars
        return other
