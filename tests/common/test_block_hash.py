"""Block hashes: their inputs, and their exact values."""

import sys

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.block_hash import (
    HASH_BYTES,
    block_hash,
    check_hash_key,
    extend_chain,
    new_hash_key,
    root_hash,
    short_hash,
    short_hashes,
    short_prefix_hashes,
)

Tokens = npt.NDArray[np.int32]

KEY = bytes(range(32))
TOKEN_LISTS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


def int32(values: list[int]) -> Tokens:
    return np.array(values, np.int32)


def chain_of(
    tokens: list[int], block_size: int, salt: bytes = b"", key: bytes = KEY
) -> list[bytes]:
    hashes: list[bytes] = []
    extend_chain(hashes, root_hash(key, salt), int32(tokens), block_size)
    return hashes


def test_hash_covers_tokens_parent_salt_and_key() -> None:
    chains = [chain_of([1, 2, 2, 3], 2), chain_of([2, 3, 2, 3], 2), chain_of([1, 2, 3, 4], 2)]
    chains.append(chain_of([1, 2, 2, 3], 2, salt=b"x"))
    chains.append(chain_of([1, 2, 2, 3], 2, key=KEY[::-1]))
    digests = [digest for chain in chains for digest in chain]
    # Of ten hashes, two are equal: chains 0 and 2 share their first block.
    assert len(set(digests)) == 9
    assert {len(digest) for digest in digests} == {HASH_BYTES}


def test_hash_has_the_bits_that_other_implementations_compute() -> None:
    expected = "297a7aba32cf26ccba4a39caf7bb4c94d6a9a916669f4b2a770bf4ff239f9aa9"
    assert block_hash(root_hash(KEY, b""), int32([1, 2])).hex() == expected


def test_hash_is_little_endian_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = chain_of([1, 2, 3, 4], 2)
    monkeypatch.setattr(sys, "byteorder", "big")  # makes the code convert the byte order
    assert chain_of([1, 2, 3, 4], 2) == expected


def test_short_hash_is_the_first_8_bytes_in_little_endian_order() -> None:
    assert short_hash(bytes(range(1, 17))) == 0x0807060504030201


@given(TOKEN_LISTS, st.integers(1, 5), st.binary(max_size=5), st.integers(0, 20))
def test_chain_has_one_hash_per_full_block_however_it_is_extended(
    tokens: list[int], block_size: int, salt: bytes, first: int
) -> None:
    expected, parent = [], root_hash(KEY, salt)
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = block_hash(parent, int32(tokens[end - block_size : end]))
        expected.append(parent)
    hashes: list[bytes] = []
    extend_chain(hashes, root_hash(KEY, salt), int32(tokens[:first]), block_size)
    extend_chain(hashes, root_hash(KEY, salt), int32(tokens), block_size)
    assert hashes == expected
    short = short_prefix_hashes(root_hash(KEY, salt), int32(tokens), block_size)
    assert short == short_hashes(expected) == [short_hash(digest) for digest in expected]


@pytest.mark.parametrize("length", [0, 15, 65])
def test_key_of_a_wrong_length_is_refused_without_being_shown(length: int) -> None:
    with pytest.raises(ValueError, match=f"16 to 64 bytes, not {length}"):
        check_hash_key(b"k" * length)


def test_new_keys_differ_and_are_valid() -> None:
    keys = {new_hash_key() for _ in range(4)}
    assert len(keys) == 4
    for key in keys:
        check_hash_key(key)
