"""Computes the bytes of each token from the decoder in tokenizer.json.

Detokenization then needs only one table lookup per token. It concatenates the bytes of the tokens
and decodes them as UTF-8. The text does not depend on how the tokens are split into messages.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tokenizers import Tokenizer

Step: TypeAlias = Callable[[bytes], bytes]
"""One step of a decoder. It maps the bytes of one token to bytes."""

TOKENS_PER_TEXT = 1024
"""Number of tokens in each text of `TokenBytes.texts`; decoding them takes about a millisecond."""

UTF8 = codecs.getincrementaldecoder("utf-8")

BYTE_TOKEN = re.compile(rb"<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizer(ValueError):
    """The tokenizer is missing, broken or of an unsupported kind. The message gives the reason."""


@dataclass(frozen=True, slots=True)
class TokenDecoder:
    """A decoder of tokenizer.json: steps for each token, and rules for the start of a text.

    Attributes:
        steps: functions that are applied to the bytes of each token, in this order.
        strip: number of leading spaces that are removed from a whole text.
        first_token_marker: bytes that are removed wherever they occur in the first token of a text.
    """

    steps: tuple[Step, ...]
    strip: int = 0
    first_token_marker: bytes = b""


def byte_alphabet() -> dict[str, int]:
    """Return a dict that maps each character of byte-level BPE to its byte.

    A printable byte of Latin-1 stands for its own character. The other bytes have the characters
    from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


def byte_level() -> Step:
    """Return the step of a ByteLevel decoder.

    The step does not change tokens with characters outside the byte alphabet.
    """
    alphabet = byte_alphabet()

    def step(piece: bytes) -> bytes:
        try:
            return bytes(alphabet[char] for char in piece.decode())
        except KeyError:  # added tokens are stored as plain text
            return piece

    return step


def byte_fallback(piece: bytes) -> bytes:
    """Decode a token of the form `<0xE6>` to its byte. Return other tokens unchanged."""
    match = BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece


def replacement(old: bytes, new: bytes) -> Step:
    """Return the step that replaces every `old` in a token by `new`."""
    return lambda piece: piece.replace(old, new)


def read_decoder(spec: dict[str, Any] | None) -> TokenDecoder:
    """Parse the `decoder` entry of a tokenizer.json.

    Raises:
        UnsupportedTokenizer: the decoder does not map tokens to bytes one by one.
    """
    if spec is None:
        raise UnsupportedTokenizer(
            "tokenizer.json has no decoder, so tokens cannot be converted to text: use a "
            "tokenizer.json with a decoder"
        )
    decoders: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    steps: list[Step] = []
    strip, marker = 0, b""
    for decoder in decoders:
        kind = decoder["type"]
        if kind == "Metaspace":
            sign = decoder["replacement"].encode()
            if decoder.get("prepend_scheme", "always") != "never":
                marker = sign
            steps.append(replacement(sign, b" "))
        elif kind == "Strip" and decoder["content"] == " " and decoder["stop"] == 0:
            strip = decoder["start"]
        elif kind != "Fuse":
            steps.append(_step(decoder))
    return TokenDecoder(tuple(steps), strip, marker)


def _step(decoder: dict[str, Any]) -> Step:
    if decoder["type"] == "ByteLevel":
        return byte_level()
    if decoder["type"] == "ByteFallback":
        return byte_fallback
    if decoder["type"] == "Replace" and "String" in decoder["pattern"]:
        return replacement(decoder["pattern"]["String"].encode(), decoder["content"].encode())
    raise UnsupportedTokenizer(
        f"the tokenizer's decoder {decoder['type']} is not supported (supported are ByteLevel, "
        "ByteFallback, Metaspace, Fuse, a leading Strip and plain Replace)"
    )


class _WholeTexts(dict[int, str | None]):
    """Maps each token to its text, or to None if its bytes alone are not valid UTF-8.

    The class is a dict that computes missing texts, because a lookup in a dict takes less time than
    a function call.

    Args:
        bytes_of: returns the bytes of a token.
    """

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token: int) -> str | None:
        try:
            text = self._bytes_of(token).decode()
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text


class TokenBytes:
    """The bytes of every token of a vocabulary, computed on first use and cached.

    Args:
        tokenizer: provides the vocabulary and the decoder.

    Raises:
        UnsupportedTokenizer: the tokenizer's decoder does not map tokens to bytes one by one.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        self._decoder = read_decoder(json.loads(decoder.__getstate__()) if decoder else None)
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token for token, entry in added.items() if entry.special)
        self._known: dict[int, bytes] = {}
        self.whole_texts = _WholeTexts(self.bytes_of)

    def bytes_of(self, token: int) -> bytes:
        """Return the bytes of a token that is not the first token of a text.

        Return b"" for an unknown token id.
        """
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = self._run(self._token_bytes(token))
        return piece

    def text_of(self, token: int) -> str:
        """Return a single token as a string, as responses show it next to its log probability."""
        return self.bytes_of(token).decode(errors="replace")

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a complete token sequence, as the tokenizer decodes the sequence.

        Invalid UTF-8 is replaced by U+FFFD as in `bytes.decode`, with every kind of decoder.
        """
        return "".join(self.texts(tokens, skip_special_tokens))

    def texts(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> Iterator[str]:
        """Yield the text of a complete token sequence in parts of `TOKENS_PER_TEXT` tokens.

        A character that begins in one part and ends in the next one belongs to the next one.
        """
        decoder = UTF8("replace")
        is_start, strip = True, self._decoder.strip
        for start in range(0, len(tokens), TOKENS_PER_TEXT):
            part = tokens[start : start + TOKENS_PER_TEXT]
            pieces = self._pieces(part, skip_special_tokens, is_start)
            is_start = is_start and not pieces
            text = decoder.decode(b"".join(pieces))
            if strip and text:
                stripped = text.lstrip(" ")
                num_stripped = min(strip, len(text) - len(stripped))
                strip = 0 if stripped else strip - num_stripped
                text = text[num_stripped:]
            yield text
        yield decoder.decode(b"", final=True)

    def _pieces(
        self, tokens: Iterable[int], skip_special_tokens: bool, is_start: bool
    ) -> list[bytes]:
        """Return the bytes of each token that has text.

        If `is_start` is True, no token before them has text.
        """
        shown = [token for token in tokens if not (skip_special_tokens and token in self.special)]
        shown = [token for token in shown if self._tokenizer.id_to_token(token) is not None]
        pieces = [self.bytes_of(token) for token in shown]
        marker = self._decoder.first_token_marker
        if pieces and marker and is_start:
            pieces[0] = self._run(self._token_bytes(shown[0]).replace(marker, b""))
        return pieces

    def _run(self, piece: bytes) -> bytes:
        for step in self._decoder.steps:
            piece = step(piece)
        return piece

    def _token_bytes(self, token: int) -> bytes:
        return (self._tokenizer.id_to_token(token) or "").encode()
