"""Blocks of a pool that are published under a content hash, and the changes of this set.

A full block is published under its hash in the sequence's chain (`penstock.common.block_hash`). The
last block of a sequence is often only partly filled. Such a block is published too, but hash chains
contain only full blocks. Therefore only `match_begun` finds partly filled blocks, and `hashes` and
`changes` do not contain them.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.common.block_hash import block_hash
from penstock.workers.scheduling.block_contents import BlockContents
from penstock.workers.scheduling.sequence import Ints


class BlockChanges:
    """Net changes of the published full blocks since this object was created, in order.

    Keys are block hashes. A block that was published and unpublished again is in neither dict.
    """

    def __init__(self) -> None:
        # maps a new block to the block before it, or to the root
        self.stored: dict[bytes, bytes] = {}
        self.evicted: dict[bytes, None] = {}

    def __bool__(self) -> bool:
        return bool(self.stored or self.evicted)

    def store(self, digest: bytes, parent: bytes) -> None:
        if digest in self.evicted:
            del self.evicted[digest]
        else:
            self.stored[digest] = parent

    def evict(self, digest: bytes) -> None:
        if digest in self.stored:
            del self.stored[digest]
        else:
            self.evicted[digest] = None


class PublishedBlocks:
    """Published blocks by hash, and hashes by block.

    Attributes:
        mask: [num_blocks] True for published blocks. Only this class changes it.
        changes: changes of the published full blocks; None: changes are not recorded.
    """

    def __init__(self, num_blocks: int) -> None:
        self.mask: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self.changes: BlockChanges | None = None
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._partial: set[bytes] = set()  # hashes of the partly filled blocks
        self._contents = BlockContents()

    def has_hash(self, digest: bytes) -> bool:
        """Return True if a block is published under this hash."""
        return digest in self._block_of

    def hashes(self) -> Sequence[bytes]:
        """Return the hashes of all published blocks that are full."""
        return [digest for digest in self._block_of if digest not in self._partial]

    def match(self, hashes: Sequence[bytes]) -> Ints:
        """Return the blocks of the longest published prefix of the hash chain `hashes`."""
        blocks = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return np.array(blocks, np.int32)

    def match_begun(self, parent: bytes, tokens: Ints) -> tuple[Ints, int]:
        """Return the published block that has the longest common prefix with `tokens`.

        The block may be only partly filled.

        Args:
            parent: hash of the last full block of a sequence, or its root.
            tokens: [n] the sequence's next tokens, fewer than a block has.

        Returns:
            The block as an array [1], or an empty array if no block begins with the first token.
            Also the length of the common prefix, in tokens.
        """
        digest, length = self._contents.longest_common(parent, tokens)
        return np.array([self._block_of[digest]] if length else [], np.int32), length

    def add(self, block: int, digest: bytes, parent: bytes, contents: bytes | None) -> None:
        """Add a full block; do nothing if the block or its hash is published already.

        Args:
            block: the block.
            digest: its hash.
            parent: hash of the block before it, or the root of its sequence.
            contents: its tokens as bytes of int32; None: `match_begun` does not find it.
        """
        if digest in self._block_of or block in self._hash_of:
            return
        self._add(block, digest)
        if contents is not None:
            self._contents.add(digest, parent, contents)
        if self.changes is not None:
            self.changes.store(digest, parent)

    def add_partial(self, block: int, parent: bytes, tokens: Ints) -> None:
        """Add a partly filled block.

        Do nothing if the block is published already, or if a published block begins with `tokens`.

        Args:
            block: the block.
            parent: hash of the block before it, or the root of its sequence.
            tokens: [n] the tokens in the block; at least one and fewer than a block has.
        """
        longest = self._contents.longest_common(parent, tokens)[1]
        if block in self._hash_of or longest == len(tokens):
            return
        digest = block_hash(parent, tokens)
        if digest in self._block_of:
            # The block is published already; `longest_common` compares only the newest blocks.
            return
        self._add(block, digest)
        self._contents.add(digest, parent, tokens.tobytes())
        self._partial.add(digest)

    def contained(self, parent: bytes, contents: bytes) -> list[int]:
        """Return the partly filled blocks after `parent` whose tokens are a prefix of `contents`.

        Args:
            parent: hash of the previous block, or the root of a sequence.
            contents: tokens of a block after `parent`, as bytes of int32.
        """
        if not self._partial:
            return []
        return [self._block_of[digest] for digest in self._contents.shorter(parent, contents)]

    def remove(self, block: int) -> None:
        """Unpublish a block."""
        digest = self._hash_of.pop(block)
        del self._block_of[digest]
        self.mask[block] = False
        self._contents.remove(digest)
        if digest in self._partial:
            self._partial.remove(digest)
        elif self.changes is not None:
            self.changes.evict(digest)

    def check(self) -> None:
        """Raise AssertionError if the bookkeeping is inconsistent."""
        assert self._hash_of == {block: digest for digest, block in self._block_of.items()}
        assert sorted(self._hash_of) == np.flatnonzero(self.mask).tolist()
        assert self._partial <= self._block_of.keys()
        self._contents.check(set(self._block_of))

    def _add(self, block: int, digest: bytes) -> None:
        self._block_of[digest] = block
        self._hash_of[block] = digest
        self.mask[block] = True
