"""Places of tokens in a text whose characters may be split between tokens."""

import codecs

UTF8 = codecs.getincrementaldecoder("utf-8")


class TextOffsets:
    """The offset of each token of one text, in characters, as tokens are added.

    A token that continues a character begins where this character begins.
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
        """Return the offsets of another text that begins with the same tokens."""
        other = TextOffsets()
        other._decoder.setstate(self._decoder.getstate())
        other._num_chars = self._num_chars
        return other
