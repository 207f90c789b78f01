"""The bytes that each token stands for, read off the decoder of tokenizer.json.

With bytes in hand, detokenizing is concatenation and UTF-8 decoding: it costs a table look-up a
token, and what comes out does not depend on how the tokens were cut into deliveries.
"""

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from tokenizers import Tokenizer

Step: TypeAlias = Callable[[bytes], bytes]
"""One step of a decoder: the bytes of one token in, bytes out."""

BYTE_TOKEN = re.compile(rb"<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizer(ValueError):
    """The tokenizer cannot be served; the message says why."""


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder as steps a token, and what happens at the very start of a text."""

    steps: tuple[Step, ...]
    strip: int = 0  # so many leading spaces go
    first_token_marker: bytes = b""  # every one of these in the first token goes


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte, the other way round.

    Printable bytes of Latin-1 stand for themselves; the others are moved to U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return alphabet


def byte_level() -> Step:
    alphabet = byte_alphabet()

    def step(piece: bytes) -> bytes:
        try:
            return bytes(alphabet[char] for char in piece.decode())
        except KeyError:  # an added token that is written as it is
            return piece

    return step


def byte_fallback(piece: bytes) -> bytes:
    match = BYTE_TOKEN.fullmatch(piece)
    return bytes([int(match[1], 16)]) if match else piece


def replacement(old: bytes, new: bytes) -> Step:
    return lambda piece: piece.replace(old, new)


def read_decoder(spec: dict[str, Any] | None) -> Decoder:
    """The decoder of a tokenizer.json; `UnsupportedTokenizer` if its tokens are not bytes."""
    if spec is None:
        raise UnsupportedTokenizer("tokenizer.json has no decoder: its tokens cannot become text")
    parts: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    steps: list[Step] = []
    strip, marker = 0, b""
    for part in parts:
        kind = part["type"]
        if kind == "Metaspace":
            sign = part["replacement"].encode()
            if part.get("prepend_scheme", "always") != "never":
                marker = sign
            steps.append(replacement(sign, b" "))
        elif kind == "Strip" and part["content"] == " " and part["stop"] == 0:
            strip = part["start"]
        elif kind != "Fuse":
            steps.append(_step(part))
    return Decoder(tuple(steps), strip, marker)


def _step(part: dict[str, Any]) -> Step:
    if part["type"] == "ByteLevel":
        return byte_level()
    if part["type"] == "ByteFallback":
        return byte_fallback
    if part["type"] == "Replace" and "String" in part["pattern"]:
        return replacement(part["pattern"]["String"].encode(), part["content"].encode())
    raise UnsupportedTokenizer(
        f"the tokenizer's decoder {part['type']} is not served "
        "(ByteLevel, ByteFallback, Metaspace, Fuse, a leading Strip and plain Replace are)"
    )


class Pieces:
    """Bytes of tokens, worked out when first asked for.

    Args:
        tokenizer: whose vocabulary and decoder it is.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        self._decoder = read_decoder(json.loads(decoder.__getstate__()) if decoder else None)
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(token for token, entry in added.items() if entry.special)
        self._known: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """The bytes of one token inside a text; none for an id that stands for nothing."""
        piece = self._known.get(token)
        if piece is None:
            piece = self._known[token] = self._run(self._token_bytes(token))
        return piece

    def text_of(self, token: int) -> str:
        """One token alone, as a string: what logprobs show."""
        return self.of(token).decode(errors="replace")

    def whole(self, tokens: Iterable[int], keep_special: bool) -> str:
        """A complete text from its tokens, as the tokenizer decodes it.

        Invalid UTF-8 gives one U+FFFD for each maximal broken part, whatever the decoder.
        """
        shown = [token for token in tokens if keep_special or token not in self.special]
        shown = [token for token in shown if self._tokenizer.id_to_token(token) is not None]
        pieces = [self.of(token) for token in shown]
        marker = self._decoder.first_token_marker
        if pieces and marker:
            pieces[0] = self._run(self._token_bytes(shown[0]).replace(marker, b""))
        text = b"".join(pieces).decode(errors="replace")
        for _ in range(self._decoder.strip):
            text = text.removeprefix(" ")
        return text

    def _run(self, piece: bytes) -> bytes:
        for step in self._decoder.steps:
            piece = step(piece)
        return piece

    def _token_bytes(self, token: int) -> bytes:
        return (self._tokenizer.id_to_token(token) or "").encode()
