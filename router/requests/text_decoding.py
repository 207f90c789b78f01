"""Decodes token ids to text. Long lists are decoded in slices."""

from collections.abc import Iterable, Sequence

from penstock.common.text.token_bytes import TokenBytes
from penstock.router.errors import invalid
from penstock.router.requests.slices import Slices


async def decoded_texts(
    token_bytes: TokenBytes, tokens: Sequence[int], skip_special: bool
) -> list[str]:
    """Return the text of the tokens in fragments, because joining 16 MiB of text takes 13 ms."""
    slices = Slices()
    texts: list[str] = []
    for text in token_bytes.texts(tokens, skip_special):
        texts.append(text)
        await slices.pause()
    return texts


async def encoded_texts(texts: Iterable[str], max_bytes: int) -> list[bytes]:
    """Return parts of a text of tokens in UTF-8.

    Raises:
        ServingError: INVALID if the whole text has more than `max_bytes`.
    """
    slices = Slices()
    found: list[bytes] = []
    size = 0
    for text in texts:
        found.append(text.encode())
        size += len(found[-1])
        if size > max_bytes:
            raise invalid(
                f"the text of the tokens has more than {max_bytes} bytes, the maximum: send fewer "
                "tokens",
                "tokens",
            )
        await slices.pause()
    return found
