"""Encoding of the messages between a router and its helper processes as frames.

A message is a list of byte strings, the items. Its frame consists of the number of items, the
length of each item, and the items themselves. All numbers are unsigned 32-bit integers in
little-endian order.
"""

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

_NUMBER = struct.Struct("<I")

MAX_FRAME_BYTES = 256 << 20
MAX_ITEMS = 1 << 20

PIECE_BYTES = 64 << 10
"""Maximum size of the pieces of a frame (see `pieces`)."""


class BadFrameError(ValueError):
    """Raised if a frame is too large, which may mean that the received bytes are not a frame."""


def pack(items: Sequence[bytes]) -> bytes:
    """Return the frame of `items`."""
    return b"".join((_head(items), *items))


def frame_size(items: Sequence[bytes]) -> int:
    """Return the number of bytes in the frame of `items`."""
    return _NUMBER.size * (1 + len(items)) + sum(map(len, items))


def pieces(items: Sequence[bytes]) -> Iterator[bytes | memoryview]:
    """Yield the frame of `items` in pieces that can be sent one by one.

    The pieces of a frame of more than PIECE_BYTES are views of the items, not copies.
    """
    if frame_size(items) <= PIECE_BYTES:
        yield pack(items)
        return
    for part in (_head(items), *items):
        view = memoryview(part)
        for start in range(0, len(view), PIECE_BYTES):
            yield view[start : start + PIECE_BYTES]


def _head(items: Sequence[bytes]) -> bytes:
    return struct.pack(f"<{1 + len(items)}I", len(items), *map(len, items))


class FrameReader:
    """Splits received bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()
        # Offsets in `_data` where the items of the first frame begin and end; None if not yet
        # known.
        self._bounds: list[int] | None = None

    def feed(self, data: bytes) -> Iterator[list[bytes]]:
        """Add received bytes; yield the frames that are complete.

        Raises:
            BadFrameError: a frame has too many items or bytes.
        """
        self._data += data
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> list[bytes] | None:
        if self._bounds is None:
            self._bounds = self._read_bounds()
        if self._bounds is None or len(self._data) < self._bounds[-1]:
            return None
        with memoryview(self._data) as view:
            items = [bytes(view[start:end]) for start, end in pairwise(self._bounds)]
        del self._data[: self._bounds[-1]]
        self._bounds = None
        return items

    def _read_bounds(self) -> list[int] | None:
        """Return where each item of the first frame begins, and where the frame ends.

        The result is None if the numbers at the start of the frame have not all arrived.
        """
        if len(self._data) < _NUMBER.size:
            return None
        (count,) = _NUMBER.unpack_from(self._data)
        if count > MAX_ITEMS:
            raise BadFrameError(f"a frame has {count} items; at most {MAX_ITEMS} are allowed")
        start = _NUMBER.size * (1 + count)
        if len(self._data) < start:
            return None
        lengths = struct.unpack_from(f"<{count}I", self._data, _NUMBER.size)
        if sum(lengths) > MAX_FRAME_BYTES:
            raise BadFrameError(
                f"a frame has {sum(lengths)} bytes; at most {MAX_FRAME_BYTES} are allowed"
            )
        return list(accumulate(lengths, initial=start))
