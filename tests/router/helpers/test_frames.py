"""Frames between routers and helper processes arrive whole, however their bytes are divided."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.router.errors import Code, ServingError
from penstock.router.helpers.frames import (
    MAX_FRAME_BYTES,
    MAX_ITEMS,
    PIECE_BYTES,
    BadFrameError,
    FrameReader,
    frame_size,
    pack,
    pieces,
)
from penstock.router.helpers.replies import Reply, decode_reply, encode_reply

FRAMES = st.lists(st.lists(st.binary(max_size=40), max_size=5), max_size=5)


@given(frames=FRAMES, cuts=st.lists(st.integers(1, 30), max_size=40))
def test_frames_are_the_same_after_any_division(frames: list[list[bytes]], cuts: list[int]) -> None:
    data = b"".join(map(pack, frames))
    reader, found = FrameReader(), []
    for cut in [*cuts, len(data)]:
        found += list(reader.feed(data[:cut]))
        data = data[cut:]
    found += list(reader.feed(data))
    assert found == frames


@given(lengths=st.lists(st.integers(0, 3 * PIECE_BYTES), max_size=4))
def test_pieces_are_the_frame(lengths: list[int]) -> None:
    items = [bytes([number]) * length for number, length in enumerate(lengths)]
    found = list(pieces(items))
    assert b"".join(found) == pack(items)
    assert len(pack(items)) == frame_size(items)
    assert all(0 < len(piece) <= PIECE_BYTES for piece in found)


@pytest.mark.parametrize(
    "head", [struct.pack("<I", MAX_ITEMS + 1), struct.pack("<II", 1, MAX_FRAME_BYTES + 1)]
)
def test_frame_beyond_the_bounds_is_refused_before_its_content(head: bytes) -> None:
    with pytest.raises(BadFrameError, match="at most"):
        list(FrameReader().feed(head))


def test_reply_keeps_its_parts_and_its_error() -> None:
    reply = Reply(7, [b"a", b""])
    assert decode_reply(encode_reply(reply)) == reply
    error = ServingError(Code.OVERLOADED, "later", "prompt", 2.5, "why")
    found = decode_reply(encode_reply(Reply(8, [], error)))
    assert found.cpu_microseconds == 8
    assert found.error is not None
    assert vars(found.error) == vars(error)


def test_error_that_contains_a_long_key_of_the_request_is_cut() -> None:
    key = "\n" * 2_000_000
    (head,) = encode_reply(Reply(8, [], ServingError(Code.INVALID, f"{key}: unknown", key)))
    assert len(head) < 20_000
    found = decode_reply([head])
    assert found.error is not None
    assert (found.error.message, found.error.param) == (key[:4096], key[:4096])


@pytest.mark.parametrize("items", [[], [b"{"], [b"[]"], [b"[1,2]"], [b'[1,"bogus","",1,1,1]']])
def test_reply_with_a_wrong_head_is_a_value_error(items: list[bytes]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (any text: it is not shown)
        decode_reply(items)
