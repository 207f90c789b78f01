"""Geometry of KV transfers: which rank sends which layers, heads and positions. No tensors, no I/O.

A rank holds a rectangle (layers x KV heads) of a sequence's KV, for all positions. MLA counts as
one head as wide as a cache row. A transfer consists of the non-empty intersections of source and
destination rectangles. Each intersection is split into messages of a few megabytes. If the block
sizes of source and destination differ, blocks are sent in units. The size of a unit is the greatest
common divisor of the two block sizes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import inf

from penstock.workers.scheduling.sequence import Ints


@dataclass(frozen=True, slots=True)
class LayerHeadRange:
    """Layers [first_layer, last_layer) x KV heads [first_head, last_head)."""

    first_layer: int
    last_layer: int
    first_head: int
    last_head: int

    @property
    def area(self) -> int:
        return (self.last_layer - self.first_layer) * (self.last_head - self.first_head)

    def contains(self, other: "LayerHeadRange") -> bool:
        return self.intersect(other) == other

    def intersect(self, other: "LayerHeadRange") -> "LayerHeadRange | None":
        both = LayerHeadRange(
            max(self.first_layer, other.first_layer),
            min(self.last_layer, other.last_layer),
            max(self.first_head, other.first_head),
            min(self.last_head, other.last_head),
        )
        empty = both.first_layer >= both.last_layer or both.first_head >= both.last_head
        return None if empty else both


@dataclass(frozen=True, slots=True)
class Shard:
    """Contents of one message: a rectangle over positions [start, stop).

    `start` is a multiple of the unit.
    """

    rectangle: LayerHeadRange
    start: int
    stop: int

    def num_blocks(self, block_size: int) -> int:
        return -(-self.stop // block_size) - self.start // block_size

    def overlaps(self, other: "Shard") -> bool:
        apart = self.stop <= other.start or other.stop <= self.start
        return not apart and self.rectangle.intersect(other.rectangle) is not None


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Size of one block of one layer and one KV head, in tokens and in bytes (K and V together)."""

    block_size: int
    bytes_per_head: int

    def num_bytes(self, shard: Shard) -> int:
        """Return the bytes of a message; a partly filled last block counts as a full block."""
        return shard.num_blocks(self.block_size) * shard.rectangle.area * self.bytes_per_head

    def max_bytes(self, rectangle: LayerHeadRange, message_bytes: int) -> int:
        """Return the size of the largest message if a rectangle is split at `message_bytes`.

        This size exceeds `message_bytes` if a single block of a single layer does.
        """
        return max(
            message_bytes, (rectangle.last_head - rectangle.first_head) * self.bytes_per_head
        )

    def cut(self, unit: int) -> "BlockShape":
        """Return the shape of a unit, which is `unit` positions of a block.

        `unit` must divide the block size.
        """
        return BlockShape(unit, self.bytes_per_head // self.block_size * unit)


@dataclass(frozen=True, slots=True)
class Route:
    """A part of a transfer: the rectangle that one source rank sends to one destination rank."""

    source: int
    destination: int
    overlap: LayerHeadRange


def routes(
    sources: Sequence[LayerHeadRange], destinations: Sequence[LayerHeadRange]
) -> list[Route]:
    """Return the non-empty intersections of rectangles, at most one per pair of ranks.

    If several source ranks hold the same rectangle, these ranks serve the destination ranks in
    turn. Each destination rank receives its whole rectangle.
    """
    holders: dict[LayerHeadRange, list[int]] = {}
    for rank, rectangle in enumerate(sources):
        holders.setdefault(rectangle, []).append(rank)
    found: list[Route] = []
    for rectangle, ranks in holders.items():
        overlaps = [(taker, rectangle.intersect(each)) for taker, each in enumerate(destinations)]
        takers = [(taker, both) for taker, both in overlaps if both is not None]
        for index, (taker, both) in enumerate(takers):
            found.append(Route(ranks[index % len(ranks)], taker, both))
    return found


def check_same_coverage(ours: Sequence[LayerHeadRange], theirs: Sequence[LayerHeadRange]) -> None:
    """Raise `BadShard` unless each worker's ranks together hold the same layers and heads.

    Any two rectangles of one worker must be disjoint or identical.
    """
    held, peer_ranges = set(ours), set(theirs)
    real = all(each.contains(each) for each in peer_ranges)
    apart = all(a.intersect(b) is None for a, b in combinations(peer_ranges, 2))
    same_size = sum(each.area for each in peer_ranges) == sum(own.area for own in held)
    covered = all(_overlap_area(own, peer_ranges) == own.area for own in held)
    if not (real and apart and same_size and covered):
        raise BadShard(
            f"the layers and heads of the peer ({len(peer_ranges)} ranges, divided among its "
            f"ranks) and of this worker ({len(held)} ranges) differ: both must have the same "
            "layers and heads, each in exactly one range"
        )


def _overlap_area(own: LayerHeadRange, ranges: Iterable[LayerHeadRange]) -> int:
    return sum(both.area for each in ranges if (both := own.intersect(each)) is not None)


def split(
    rectangle: LayerHeadRange,
    start: int,
    stop: int,
    shape: BlockShape,
    message_bytes: int,
) -> Iterator[Shard]:
    """Split a rectangle over positions [start, stop) into messages of at most `message_bytes`.

    Layers are split only if one block of all layers is larger than the limit. Heads are never
    split, so one block of one layer may exceed the limit. Messages have nearly equal sizes, to
    avoid a small last message.
    """
    heads = rectangle.last_head - rectangle.first_head
    num_layers = rectangle.last_layer - rectangle.first_layer
    num_blocks = Shard(rectangle, start, stop).num_blocks(shape.block_size)
    layer_bytes = heads * shape.bytes_per_head
    for first, last in _even_ranges(num_layers, message_bytes // layer_bytes):
        layers = (rectangle.first_layer + first, rectangle.first_layer + last)
        chunk = LayerHeadRange(*layers, rectangle.first_head, rectangle.last_head)
        for block, end in _even_ranges(num_blocks, message_bytes // ((last - first) * layer_bytes)):
            stops = min(start + end * shape.block_size, stop)
            yield Shard(chunk, start + block * shape.block_size, stops)


def _even_ranges(num_items: int, most: int) -> Iterator[tuple[int, int]]:
    """Split `num_items` items into the fewest nearly equal ranges [first, last).

    No range has more than `most` items.
    """
    num_ranges = -(-num_items // max(1, most))
    return pairwise(num_items * index // num_ranges for index in range(num_ranges + 1))


def blocks_of(shard: Shard, blocks: Ints, start: int, block_size: int) -> Ints:
    """Return the part of `blocks` that a message covers; `blocks[0]` holds position `start`."""
    first = shard.start // block_size - start // block_size
    return blocks[first : first + shard.num_blocks(block_size)]


class BadShard(ValueError):
    """A message does not belong to its transfer, or two workers' ranks are incompatible."""


class Coverage:
    """Record of the announced and received parts of a rectangle over positions [start, stop).

    Args:
        max_bytes: Maximum size of a message.
    """

    def __init__(
        self,
        rectangle: LayerHeadRange,
        start: int,
        stop: int,
        shape: BlockShape,
        max_bytes: float = inf,
    ) -> None:
        self.rectangle = rectangle
        self.start = start
        self.stop = stop
        self.shape = shape
        self._max_bytes = max_bytes
        self._messages: list[Shard] = []
        self._unannounced = self._missing = (stop - start) * rectangle.area

    def announce(self, shard: Shard, num_bytes: int) -> None:
        """Record a message.

        Raise `BadShard` if the message has a wrong size, overlaps another one, or lies outside of
        this rank's part.
        """
        block_size = self.shape.block_size
        inside = self.start <= shard.start < shard.stop <= self.stop
        if not inside or not self.rectangle.contains(shard.rectangle):
            raise BadShard(
                f"a message has the positions {shard.start} to {shard.stop} of {shard.rectangle}, "
                f"but this rank receives only the positions {self.start} to {self.stop} of "
                f"{self.rectangle}"
            )
        if shard.start % block_size or (shard.stop % block_size and shard.stop != self.stop):
            raise BadShard(
                f"a message has the positions {shard.start} to {shard.stop}: expected multiples of "
                f"the block size {block_size}; the end may also be {self.stop}, the transfer's end"
            )
        if num_bytes != self.shape.num_bytes(shard):
            expected = self.shape.num_bytes(shard)
            raise BadShard(
                f"a message has {num_bytes} bytes, but its positions, layers and heads need "
                f"{expected}"
            )
        if num_bytes > self._max_bytes:
            raise BadShard(
                f"a message has {num_bytes} bytes, expected at most {self._max_bytes:.0f}, the "
                "size of a message buffer"
            )
        if any(shard.overlaps(other) for other in self._messages):
            raise BadShard(
                f"a message with the positions {shard.start} to {shard.stop} repeats a part of an "
                "earlier message"
            )
        self._messages.append(shard)
        self._unannounced -= _volume(shard)

    def fill(self, shard: Shard) -> None:
        """Record that an announced message was received and verified."""
        self._missing -= _volume(shard)

    @property
    def announced(self) -> bool:
        """True if messages for every position, layer and head have been announced."""
        return self._unannounced == 0

    @property
    def complete(self) -> bool:
        return self._missing == 0


def _volume(shard: Shard) -> int:
    return (shard.stop - shard.start) * shard.rectangle.area
