"""Decodes token ids to text. Long lists are decoded in slices."""

from collections.abc import Sequence

from penstock.common.text.token_bytes import TokenBytes
from penstock.router.requests.slices import Slices

TOKENS_PER_SLICE = 1024
"""Number of tokens that are decoded without a pause, in less than a millisecond."""


async def decode(token_bytes: TokenBytes, tokens: Sequence[int], skip_special: bool) -> str:
    """Return the text of the tokens, as `TokenBytes.decode` does."""
    if len(tokens) <= TOKENS_PER_SLICE:
        return token_bytes.decode(tokens, skip_special)
    slices = Slices()
    pieces: list[bytes] = []
    for start in range(0, len(tokens), TOKENS_PER_SLICE):
        part = tokens[start : start + TOKENS_PER_SLICE]
        if shown := token_bytes.pieces(part, skip_special, is_start=not pieces):
            pieces.append(b"".join(shown))
        await slices.pause()
    return token_bytes.join(pieces)
