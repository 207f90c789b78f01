"""Block pools in which sequences of named blocks are cached."""

import numpy as np
from hypothesis import strategies as st

from penstock.common.block_hash import block_hash, root_hash
from penstock.workers.scheduling.kv_pool import BlockPool, State
from penstock.workers.scheduling.sequence import Ints

KEY = bytes(range(32))
PREFIXES = st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple)
"""Names of the blocks of a sequence, from its start."""


def chain(*names: int) -> list[bytes]:
    """Return the hashes of a sequence's blocks."""
    hashes = [root_hash(KEY, b"")]
    for name in names:
        hashes.append(block_hash(hashes[-1], np.array([name], np.int32)))
    return hashes[1:]


def cache(pool: BlockPool, names: tuple[int, ...]) -> Ints:
    """Compute as many blocks of a sequence as fit; publish, release and return these blocks."""
    hashes = chain(*names)[: pool.num_blocks]
    found = pool.published.match(hashes)
    pool.retain(found, State.USED)
    taken = pool.take(len(hashes) - len(found), State.USED)
    blocks = np.concatenate((found, taken))
    pool.publish(blocks.tolist(), hashes, [b"", *hashes[:-1]])
    pool.release(blocks, State.USED)
    return blocks


def forget(pool: BlockPool, blocks: Ints) -> None:
    """Unpublish cached blocks, so that no prompt finds them."""
    pool.retain(blocks, State.USED)
    pool.forget(blocks)
    pool.release(blocks, State.USED)
