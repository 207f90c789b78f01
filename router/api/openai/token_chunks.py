"""Chunks of a stream for tokens that only add text."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring

from penstock.router.api.openai.json_fragments import dumps
from penstock.router.api.openai.text_offsets import TextOffsets
from penstock.router.requests.response_stream import Delta

PLAIN: Mapping[str, None] = {"logprobs": None, "finish_reason": None, "stop_reason": None}
"""Fields of a choice whose token only adds text."""


@dataclass(slots=True)
class StreamProgress:
    """The number of tokens sent in a stream, and the text offsets of each choice that has begun."""

    num_tokens: int = 0
    # Text offsets of each choice, by its index.
    offsets: dict[int, TextOffsets] = field(default_factory=dict)

    def is_first(self, index: int) -> bool:
        return index not in self.offsets

    def add(self, index: int, delta: Delta) -> TextOffsets:
        """Count a delta's tokens; return the offsets of its choice."""
        self.num_tokens += len(delta.tokens)
        offsets = self.offsets.get(index)
        if offsets is None:
            offsets = self.offsets[index] = TextOffsets()
        return offsets


class TokenChunks:
    """Makes chunks for tokens that only add text, from the constant JSON around the text.

    Args:
        progress: counts the tokens.
        is_plain: whether tokens add only their text to a chunk; if not, `get` returns None.
    """

    TEXT = "\0"  # placeholder for the text in the chunk that serves as a template

    __slots__ = ("_is_plain", "_progress", "_sides")

    def __init__(self, progress: StreamProgress, is_plain: bool) -> None:
        self._is_plain = is_plain
        self._progress = progress
        # JSON before and after the text, by request index and choice.
        self._sides: dict[tuple[int, int], tuple[str, str]] = {}

    def add(self, delta: Delta, example: Callable[[str], str]) -> None:
        """Prepare the chunks of a delta's choice; `example` returns the chunk for a text."""
        choice = (delta.index, delta.choice)
        if self._is_plain and choice not in self._sides:
            before, _, after = example(self.TEXT).rpartition(dumps(self.TEXT))
            self._sides[choice] = before, after

    def get(self, index: int, choice: int, text: str) -> bytes | None:
        """Return the chunk for a token, or None if `add` has not prepared the token's choice."""
        sides = self._sides.get((index, choice))
        if sides is None:
            return None
        self._progress.num_tokens += 1
        return f"{sides[0]}{encode_basestring(text)}{sides[1]}".encode()
