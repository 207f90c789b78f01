"""JSON text in fragments."""

import random

from penstock.router.requests.json_text import CHARS_PER_FRAGMENT, decoded_fragments


def test_long_texts_are_decoded_in_parts_and_short_ones_as_they_are() -> None:
    drawn = random.Random(3)
    # Characters of 1 to 4 bytes, so that the bounds of the parts are within characters.
    long = "".join(drawn.choices("a\u00e9\u20ac\U0001f600", k=CHARS_PER_FRAGMENT))
    texts = list(decoded_fragments([b"short", b"", long.encode(), "\u00e9".encode()]))
    assert (texts[0], texts[-1]) == ("short", "\u00e9")
    assert "".join(texts[1:-1]) == long
    assert max(map(len, texts)) <= CHARS_PER_FRAGMENT
    assert len(texts) == 2 + -(-len(long.encode()) // CHARS_PER_FRAGMENT)
