"""The search for a cached block whose first tokens equal the rest of a prompt."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.scheduling.block_contents import MAX_COMPARED, BlockContents
from penstock.workers.scheduling.sequence import Ints

SIZE = 4
ROOT = b"root"


def ints(tokens: list[int]) -> Ints:
    return np.array(tokens, np.int32)


def common(first: list[int], second: list[int]) -> int:
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


# The last tokens may fill a block only partly.
blocks_of_tokens = st.lists(st.integers(0, 2), min_size=1, max_size=SIZE)


@given(
    st.lists(blocks_of_tokens, max_size=MAX_COMPARED, unique_by=tuple),
    st.sets(st.integers(0, MAX_COMPARED)),
    st.lists(st.integers(0, 2), max_size=SIZE - 1),
)
def test_the_longest_common_beginning_is_found(
    blocks: list[list[int]], removed: set[int], wanted: list[int]
) -> None:
    contents = BlockContents()
    left = {}
    for number, tokens in enumerate(blocks):
        digest = bytes([number])
        contents.add(digest, ROOT, ints(tokens).tobytes())
        left[digest] = tokens
    for number in removed:
        contents.remove(bytes([number]))
        left.pop(bytes([number]), None)
    contents.check(set(left))
    digest, length = contents.longest_common(ROOT, ints(wanted))
    assert length == max((common(tokens, wanted) for tokens in left.values()), default=0)
    assert common(left[digest], wanted) == length if length else digest == b""
    assert contents.longest_common(b"other", ints(wanted)) == (b"", 0)


@given(st.lists(blocks_of_tokens, max_size=MAX_COMPARED, unique_by=tuple), blocks_of_tokens)
def test_blocks_that_a_longer_block_contains_are_found(
    blocks: list[list[int]], wanted: list[int]
) -> None:
    contents = BlockContents()
    for number, tokens in enumerate(blocks):
        contents.add(bytes([number]), ROOT, ints(tokens).tobytes())
    found = [blocks[digest[0]] for digest in contents.shorter(ROOT, ints(wanted).tobytes())]
    expected = [tokens for tokens in blocks if wanted[: len(tokens)] == tokens != wanted]
    assert sorted(found) == sorted(expected)


def test_one_look_up_compares_a_bounded_number_of_blocks() -> None:
    contents = BlockContents()
    contents.add(b"best", ROOT, ints([1, 2, 3, 4]).tobytes())
    for number in range(MAX_COMPARED - 1):
        contents.add(b"%d" % number, ROOT, ints([1, 100 + number, 0, 0]).tobytes())
    assert contents.longest_common(ROOT, ints([1, 2, 3])) == (b"best", 3)
    contents.add(b"newest", ROOT, ints([1, 9, 9, 9]).tobytes())
    assert contents.longest_common(ROOT, ints([1, 2, 3])) == (b"newest", 1)
