"""The geometry of hand-overs: every position, layer and head travels exactly once."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.transfer.shards import (
    BadShard,
    BlockShape,
    Coverage,
    Rectangle,
    Shard,
    intersections,
    split,
)

SHAPE = BlockShape(block_size=4, bytes_per_head=10)


@st.composite
def grids(draw: st.DrawFn, layers: int, heads: int) -> list[Rectangle]:
    """The rectangles of a worker's ranks: layers and heads each cut at the same places."""

    def cuts(num: int) -> list[int]:
        inner = draw(st.sets(st.integers(1, num - 1), max_size=3)) if num > 1 else set()
        return [0, *sorted(inner), num]

    rows, columns = cuts(layers), cuts(heads)
    return [Rectangle(*row, *column) for row in pairwise(rows) for column in pairwise(columns)]


def cells(part: Rectangle) -> set[tuple[int, int]]:
    layers = range(part.first_layer, part.last_layer)
    return {(layer, head) for layer in layers for head in range(part.first_head, part.last_head)}


@given(grids(6, 4), grids(6, 4))
def test_intersections_cover_each_cell_once(
    sources: list[Rectangle], destinations: list[Rectangle]
) -> None:
    seen: list[tuple[int, int]] = []
    for i, j, both in intersections(sources, destinations):
        assert both.area > 0
        assert sources[i].contains(both)
        assert destinations[j].contains(both)
        seen += cells(both)
    assert len(seen) == len(set(seen)) == 24


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 10),
    st.integers(1, 60),
    st.integers(1, 2000),
)
def test_messages_fill_what_is_asked_exactly(
    layers: int, heads: int, first_block: int, num_tokens: int, message_bytes: int
) -> None:
    part = Rectangle(2, 2 + layers, 1, 1 + heads)
    start = first_block * SHAPE.block_size
    stop = start + num_tokens
    coverage = Coverage(part, start, stop, SHAPE)
    shards = list(split(part, start, stop, SHAPE, message_bytes))
    for shard in shards:
        assert not coverage.announced
        coverage.announce(shard, SHAPE.num_bytes(shard))
    assert coverage.announced
    for shard in shards:
        assert not coverage.complete
        coverage.fill(shard)
    assert coverage.complete
    smallest = heads * SHAPE.bytes_per_head  # one block of one layer
    sizes = [SHAPE.num_bytes(shard) for shard in shards]
    assert max(sizes) <= max(message_bytes, smallest)


def test_messages_are_even() -> None:
    part = Rectangle(0, 8, 0, 4)
    block = SHAPE.num_bytes(Shard(part, 0, 4))
    shards = list(split(part, 0, 4 * 101, SHAPE, 10 * block))
    sizes = [SHAPE.num_bytes(shard) for shard in shards]
    assert len(sizes) == 11
    assert set(sizes) == {9 * block, 10 * block}


WHOLE = Rectangle(0, 2, 0, 2)


@pytest.mark.parametrize(
    ("shard", "num_bytes", "problem"),
    [
        (Shard(WHOLE, 0, 12), 120, "outside"),
        (Shard(WHOLE, 4, 14), 120, "outside"),
        (Shard(WHOLE, 8, 8), 0, "outside"),
        (Shard(Rectangle(0, 3, 0, 2), 4, 8), 60, "outside"),
        (Shard(Rectangle(0, 2, 2, 3), 4, 8), 20, "outside"),
        (Shard(Rectangle(1, 1, 0, 2), 4, 8), 0, "outside"),
        (Shard(WHOLE, 5, 8), 40, "begin and end with a block"),
        (Shard(WHOLE, 4, 7), 40, "begin and end with a block"),
        (Shard(WHOLE, 4, 8), 39, "39 bytes, not 40"),
        (Shard(WHOLE, 4, 13), 1 << 40, "bytes, not 120"),
    ],
)
def test_a_message_without_a_place_is_refused(shard: Shard, num_bytes: int, problem: str) -> None:
    coverage = Coverage(WHOLE, 4, 13, SHAPE)
    with pytest.raises(BadShard, match=problem):
        coverage.announce(shard, num_bytes)
    coverage.announce(Shard(WHOLE, 4, 13), 120)
    assert coverage.announced


def test_a_message_twice_is_refused() -> None:
    coverage = Coverage(WHOLE, 4, 13, SHAPE)
    coverage.announce(Shard(WHOLE, 4, 8), 40)
    for shard in (Shard(WHOLE, 4, 8), Shard(Rectangle(1, 2, 0, 2), 4, 13)):
        with pytest.raises(BadShard, match="repeats"):
            coverage.announce(shard, SHAPE.num_bytes(shard))
    assert not coverage.announced
