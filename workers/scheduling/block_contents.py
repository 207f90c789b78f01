"""The tokens of published blocks, to find blocks that share only their first tokens with a prompt.

A hash chain finds only full blocks. A prompt may also agree with the first tokens of a cached block
and differ later in the block. Or it may continue a cached block that is filled only partly. In
these two cases, the KV of the common tokens can be reused if the block is copied. SGLang's radix
tree reuses such tokens too, because its nodes can be split at any token.
"""

from collections.abc import Iterator
from itertools import islice

import numpy as np

from penstock.workers.scheduling.sequence import Ints

MAX_COMPARED = 16
"""Number of blocks, newest first, that one look-up compares with a prompt."""

_TOKEN_BYTES = 4


class BlockContents:
    """Tokens of published blocks, indexed by a block's parent (previous block) and first token."""

    def __init__(self) -> None:
        # maps the hash of a block to the block's key in `_children` and its tokens
        self._tokens_of: dict[bytes, tuple[bytes, bytes]] = {}
        # Maps the bytes of a parent's hash and a first token to the hashes of the blocks with this
        # parent and this first token, oldest first.
        self._children: dict[bytes, dict[bytes, None]] = {}

    def add(self, digest: bytes, parent: bytes, tokens: bytes) -> None:
        """Add a block.

        Args:
            digest: hash of the block.
            parent: hash of the block before it, or the root of its sequence.
            tokens: the block's tokens as the bytes of an int32 array; at least one token.
        """
        key = parent + tokens[:_TOKEN_BYTES]
        self._tokens_of[digest] = key, tokens
        self._children.setdefault(key, {})[digest] = None

    def remove(self, digest: bytes) -> None:
        """Remove a block; ignore a block that was not added."""
        found = self._tokens_of.pop(digest, None)
        if found is None:
            return
        siblings = self._children[found[0]]
        del siblings[digest]
        if not siblings:
            del self._children[found[0]]

    def shorter(self, parent: bytes, tokens: bytes) -> list[bytes]:
        """Return the hashes of blocks after `parent` whose tokens are a proper prefix of `tokens`.

        Args:
            parent: hash of a block, or the root of a sequence.
            tokens: the tokens of a block as the bytes of an int32 array.
        """
        siblings = self._children.get(parent + tokens[:_TOKEN_BYTES], {})
        found = ((digest, self._tokens_of[digest][1]) for digest in self._newest(siblings))
        return [
            digest
            for digest, begin in found
            if len(begin) < len(tokens) and tokens.startswith(begin)
        ]

    def longest_common(self, parent: bytes, tokens: Ints) -> tuple[bytes, int]:
        """Return the block after `parent` with the longest common prefix with `tokens`.

        Return (hash of the block, length of the prefix), or (b"", 0) if there is no such block.

        Args:
            parent: hash of a block, or the root of a sequence.
            tokens: [n] the tokens after `parent`; n is less than the size of a block.
        """
        if not tokens.size:
            return b"", 0
        wanted = np.ascontiguousarray(tokens, np.int32)
        siblings = self._children.get(parent + wanted[:1].tobytes(), {})
        best, longest = b"", 0
        for digest in self._newest(siblings):
            found = np.frombuffer(self._tokens_of[digest][1], np.int32)[: wanted.size]
            differ = np.flatnonzero(found != wanted[: found.size])
            length = int(differ[0]) if differ.size else found.size
            if length > longest:
                best, longest = digest, length
                if length == wanted.size:
                    break
        return best, longest

    def _newest(self, siblings: dict[bytes, None]) -> Iterator[bytes]:
        return islice(reversed(siblings), MAX_COMPARED)

    def check(self, published: set[bytes]) -> None:
        """Raise AssertionError if this object has a block that is not in `published`."""
        assert self._tokens_of.keys() <= published
        known = {digest for siblings in self._children.values() for digest in siblings}
        assert known == self._tokens_of.keys()
        assert all(self._children.values())
