"""JSON text in fragments, each of which takes at most a few milliseconds to make."""

import json
from collections.abc import Iterator

CHARS_PER_FRAGMENT = 64 << 10

dumps = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


def string(text: str) -> Iterator[str]:
    """Yield a text as a JSON string, in fragments."""
    yield '"'
    for start in range(0, len(text), CHARS_PER_FRAGMENT):
        yield dumps(text[start : start + CHARS_PER_FRAGMENT])[1:-1]
    yield '"'
