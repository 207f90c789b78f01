"""Content hashes of KV blocks, used to recognize equal prefixes.

The hash of a full block covers three things:

- the block's token ids, as little-endian int32;
- the hash of the previous block (the parent), and thereby every earlier token of the sequence;
- the salt, used in place of the parent for the first block. Only sequences with equal salts share
  blocks, so different salts separate tenants and adapters.

Model weights and dtype are not part of the hash: compare hashes only between caches with equal
layout fingerprints. `block_hash` is BLAKE2b with a 16-byte digest, keyed by the parent's hash;
`root_hash` is the unkeyed BLAKE2b of the salt. Other implementations must produce equal hashes.
"""

import sys
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

HASH_BYTES = 16


def root_hash(salt: bytes) -> bytes:
    """Return the hash of `salt`, used as parent hash of the first block of a sequence."""
    return blake2b(salt, digest_size=HASH_BYTES).digest()


def block_hash(parent: bytes, tokens: npt.NDArray[np.int32]) -> bytes:
    """Return the 16-byte hash of a full block.

    Args:
        parent: hash of the previous block, or `root_hash(salt)` for the first block.
        tokens: [block_size] int32 token ids.
    """
    return blake2b(_packed(tokens), digest_size=HASH_BYTES, key=parent).digest()


def extend_chain(
    hashes: list[bytes], salt: bytes, tokens: npt.NDArray[np.int32], block_size: int
) -> None:
    """Append to `hashes` the hashes of the full blocks of `tokens` that are still missing.

    Args:
        hashes: hashes of the first `len(hashes)` blocks of the sequence; extended in place.
        salt: see `root_hash`.
        tokens: [n] int32 token ids of the sequence from its start; an incomplete last block is
            ignored.
        block_size: tokens per block.
    """
    parent = hashes[-1] if hashes else root_hash(salt)
    data, step = _packed(tokens), block_size * tokens.itemsize
    for start in range(len(hashes) * step, len(data) - step + 1, step):
        block = data[start : start + step]
        parent = blake2b(block, digest_size=HASH_BYTES, key=parent).digest()
        hashes.append(parent)


def _packed(tokens: npt.NDArray[np.int32]) -> bytes:
    return (tokens if sys.byteorder == "little" else tokens.astype("<i4")).tobytes()
