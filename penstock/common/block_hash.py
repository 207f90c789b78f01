"""Computes content hashes of KV blocks. Equal prefixes are found by these hashes.

The hash of a full block depends on two things:

- the token ids of the block, as little-endian int32;
- the hash of the previous block, which is called the parent and depends on all earlier tokens.

The first block of a sequence has no previous block. Its parent is the root hash, which is a hash of
the salt, keyed by a secret of the cluster. Only sequences with equal salts share blocks, so
different salts separate tenants and adapters. A tenant who does not know the secret cannot compute
the hash of a guessed prompt. The tenant therefore cannot find out whether another tenant has sent
this prompt.

The hash does not depend on the weights and the dtype of the model. Compare hashes only between
caches of the same cluster, and only if the fingerprints in their layouts are equal.

`block_hash` is BLAKE2b with a 32-byte digest, keyed by the parent. `root_hash` is the BLAKE2b of
the salt, keyed by the secret. Other implementations must produce equal hashes.
"""

import secrets
import sys
from collections.abc import Collection, Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

HASH_BYTES = 32
MAX_SALT_BYTES = 256
SHORT_HASH_BYTES = 8
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64


def new_hash_key() -> bytes:
    """Return a new random key for `root_hash`."""
    return secrets.token_bytes(MAX_KEY_BYTES)


def check_hash_key(key: bytes) -> None:
    """Raise ValueError if a hash key is too short or too long.

    The message of the error does not contain the key.
    """
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ValueError(
            f"hash_key must have {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, not {len(key)}"
        )


def root_hash(key: bytes, salt: bytes) -> bytes:
    """Return the hash that is the parent of the first block of a sequence.

    Args:
        key: secret of the cluster. If the key is empty, everybody can compute the hash.
        salt: text that separates tenants. Sequences share blocks only if their salts are equal.
    """
    return blake2b(salt, digest_size=HASH_BYTES, key=key).digest()


def block_hash(parent: bytes, tokens: npt.NDArray[np.int32]) -> bytes:
    """Return the 32-byte hash of a full block.

    Args:
        parent: hash of the previous block, or `root_hash` for the first block.
        tokens: [block_size] int32 token ids.
    """
    return blake2b(_packed(tokens), digest_size=HASH_BYTES, key=parent).digest()


def short_hash(digest: bytes) -> int:
    """Return the first 8 bytes of a block hash as an unsigned little-endian integer.

    Workers and routers exchange short hashes instead of full hashes. Among a million blocks, the
    probability that any two have equal short hashes is 3e-8.
    """
    return int.from_bytes(digest[:SHORT_HASH_BYTES], "little")


def short_hashes(hashes: Collection[bytes]) -> list[int]:
    """Return the short hash of each block hash."""
    words = np.frombuffer(b"".join(hashes), "<u8")
    short: list[int] = words[:: HASH_BYTES // SHORT_HASH_BYTES].tolist()
    return short


def extend_chain(
    hashes: list[bytes], root: bytes, tokens: npt.NDArray[np.int32], block_size: int
) -> None:
    """Append the hashes of those full blocks of a sequence that are not in `hashes` yet.

    Args:
        hashes: hashes of the first blocks of the sequence. The list is extended in place.
        root: result of `root_hash` for the sequence.
        tokens: [n] int32 token ids of the sequence from its start. An incomplete last block has no
            hash.
        block_size: number of tokens per block.
    """
    parent = hashes[-1] if hashes else root
    data, step = _packed(tokens), block_size * tokens.itemsize
    for start in range(len(hashes) * step, len(data) - step + 1, step):
        block = data[start : start + step]
        parent = blake2b(block, digest_size=HASH_BYTES, key=parent).digest()
        hashes.append(parent)


def short_prefix_hashes(
    root: bytes, tokens: npt.NDArray[np.int32], block_size: int
) -> Sequence[int]:
    """Return the short hashes of all full blocks of a sequence (see `extend_chain`)."""
    hashes: list[bytes] = []
    extend_chain(hashes, root, tokens, block_size)
    return short_hashes(hashes)


def _packed(tokens: npt.NDArray[np.int32]) -> bytes:
    return (tokens if sys.byteorder == "little" else tokens.astype("<i4")).tobytes()
