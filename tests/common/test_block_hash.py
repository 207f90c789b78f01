"""Block hashes: their inputs, and their exact values."""

import sys

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.block_hash import HASH_BYTES, block_hash, extend_chain, root_hash

Tokens = npt.NDArray[np.int32]

TOKEN_LISTS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


def int32(values: list[int]) -> Tokens:
    return np.array(values, np.int32)


def chain_of(tokens: list[int], block_size: int, salt: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, salt, int32(tokens), block_size)
    return hashes


def test_hash_covers_tokens_parent_and_salt() -> None:
    chains = [chain_of([1, 2, 2, 3], 2), chain_of([2, 3, 2, 3], 2), chain_of([1, 2, 3, 4], 2)]
    chains.append(chain_of([1, 2, 2, 3], 2, salt=b"x"))
    digests = [digest for chain in chains for digest in chain]
    assert len(set(digests)) == 7  # chains 0 and 2 share only their first block
    assert {len(digest) for digest in digests} == {HASH_BYTES}


def test_hash_has_the_bits_that_other_implementations_compute() -> None:
    assert block_hash(root_hash(b""), int32([1, 2])).hex() == "27685c26cc8eeeb869410d042fdc7bb2"


def test_hash_is_little_endian_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = chain_of([1, 2, 3, 4], 2)
    monkeypatch.setattr(sys, "byteorder", "big")  # forces the explicit byte-order conversion
    assert chain_of([1, 2, 3, 4], 2) == expected


@given(TOKEN_LISTS, st.integers(1, 5), st.binary(max_size=5), st.integers(0, 20))
def test_chain_has_one_hash_per_full_block_however_it_is_extended(
    tokens: list[int], block_size: int, salt: bytes, first: int
) -> None:
    expected, parent = [], root_hash(salt)
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = block_hash(parent, int32(tokens[end - block_size : end]))
        expected.append(parent)
    hashes: list[bytes] = []
    extend_chain(hashes, salt, int32(tokens[:first]), block_size)
    extend_chain(hashes, salt, int32(tokens), block_size)
    assert hashes == expected
