"""What moves in a KV transfer, as plain geometry: no tensors, no I/O.

What a rank holds of a sequence's KV is a rectangle, layers x KV heads, over positions; what latent
attention keeps is one head, as wide as its rows are. The plan of a transfer is the list of
non-empty intersections of source and destination rectangles, each cut into messages of a few
megabytes. Blocks of both sides are cut into units, which travel whole: what divides both sizes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise


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
    """One message: a rectangle over positions [start, stop); `start` begins a unit."""

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
    """What one block of one layer and one KV head is, in tokens and bytes (K and V together)."""

    block_size: int
    bytes_per_head: int

    def num_bytes(self, shard: Shard) -> int:
        """Of the message: whole blocks travel, also where the last one is not full."""
        return shard.num_blocks(self.block_size) * shard.rectangle.area * self.bytes_per_head

    def cut(self, unit: int) -> "BlockShape":
        """Of the units of so many positions, which divide a block, as if they were blocks."""
        return BlockShape(unit, self.bytes_per_head // self.block_size * unit)


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank of the source sends to one of the destination."""

    source: int
    destination: int
    overlap: LayerHeadRange


def routes(
    sources: Sequence[LayerHeadRange], destinations: Sequence[LayerHeadRange]
) -> list[Route]:
    """The non-empty intersections, at most one for two ranks.

    What several source ranks hold alike is sent by one of them, by turns of the destination's
    ranks; every destination rank gets all that it holds.
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
    """`BadShard` unless the ranks of both sides hold the same whole, each part of it once (or
    several times alike)."""
    held, peer_ranges = set(ours), set(theirs)
    real = all(each.contains(each) for each in peer_ranges)
    apart = all(a.intersect(b) is None for a, b in combinations(peer_ranges, 2))
    same_size = sum(each.area for each in peer_ranges) == sum(own.area for own in held)
    covered = all(_overlap_area(own, peer_ranges) == own.area for own in held)
    if not (real and apart and same_size and covered):
        raise BadShard("the ranks of both sides do not hold the same layers and heads")


def _overlap_area(own: LayerHeadRange, ranges: Iterable[LayerHeadRange]) -> int:
    return sum(both.area for each in ranges if (both := own.intersect(each)) is not None)


def split(
    rectangle: LayerHeadRange,
    start: int,
    stop: int,
    shape: BlockShape,
    message_bytes: int,
) -> Iterator[Shard]:
    """Cut a rectangle over positions [start, stop) into messages of at most `message_bytes`.

    Layers are cut only where one block of all of them is more than that, and heads never: one block
    of one layer always is a message. Parts are even, so that there is no small last one.
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
    """[first, last) of as few parts as can be, each of at most `most` items, or of one."""
    num_ranges = -(-num_items // max(1, most))
    return pairwise(num_items * index // num_ranges for index in range(num_ranges + 1))


class BadShard(ValueError):
    """A message that has no place in its transfer, or ranks that make none: the text says why."""


class Coverage:
    """Which part of a rectangle over positions [start, stop) is announced, and which is in."""

    def __init__(self, rectangle: LayerHeadRange, start: int, stop: int, shape: BlockShape) -> None:
        self.rectangle = rectangle
        self.start = start
        self.stop = stop
        self.shape = shape
        self._messages: list[Shard] = []
        self._unannounced = self._missing = (stop - start) * rectangle.area

    def announce(self, shard: Shard, num_bytes: int) -> None:
        """A message is coming; `BadShard` if it is outside, overlaps or has a wrong size."""
        block_size = self.shape.block_size
        inside = self.start <= shard.start < shard.stop <= self.stop
        if not inside or not self.rectangle.contains(shard.rectangle):
            raise BadShard("a message lies outside of what was asked for")
        if shard.start % block_size or (shard.stop % block_size and shard.stop != self.stop):
            raise BadShard("a message does not begin and end with a block")
        if num_bytes != self.shape.num_bytes(shard):
            raise BadShard(f"a message of {num_bytes} bytes, not {self.shape.num_bytes(shard)}")
        if any(shard.overlaps(other) for other in self._messages):
            raise BadShard("a message repeats what another brought")
        self._messages.append(shard)
        self._unannounced -= _volume(shard)

    def fill(self, shard: Shard) -> None:
        """An announced message is in and verified."""
        self._missing -= _volume(shard)

    @property
    def announced(self) -> bool:
        """Whether every position, layer and head is in some message."""
        return self._unannounced == 0

    @property
    def complete(self) -> bool:
        return self._missing == 0


def _volume(shard: Shard) -> int:
    return (shard.stop - shard.start) * shard.rectangle.area
