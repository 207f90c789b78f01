"""The geometry of KV transfers: every position, layer and head is sent exactly once."""

from collections import Counter
from itertools import pairwise
from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.kv_transfer.shards import (
    BadShard,
    BlockShape,
    Coverage,
    LayerHeadRange,
    Shard,
    check_same_coverage,
    routes,
    split,
)

SHAPE = BlockShape(block_size=4, bytes_per_head=10)


@st.composite
def grids(draw: st.DrawFn, layers: int, heads: int) -> list[LayerHeadRange]:
    """Generate rectangles of ranks: cells of a grid, each held by an equal number of ranks."""

    def cuts(num: int) -> list[int]:
        inner = draw(st.sets(st.integers(1, num - 1), max_size=3)) if num > 1 else set()
        return [0, *sorted(inner), num]

    rows, columns, copies = cuts(layers), cuts(heads), draw(st.integers(1, 3))
    parts = [
        LayerHeadRange(*row, *column) for row in pairwise(rows) for column in pairwise(columns)
    ]
    return draw(st.permutations(parts * copies))


def cells(part: LayerHeadRange) -> set[tuple[int, int]]:
    layers = range(part.first_layer, part.last_layer)
    return {(layer, head) for layer in layers for head in range(part.first_head, part.last_head)}


@given(grids(6, 4), grids(6, 4))
def test_every_destination_rank_receives_each_cell_once(
    sources: list[LayerHeadRange], destinations: list[LayerHeadRange]
) -> None:
    found = routes(sources, destinations)
    pairs = [(route.source, route.destination) for route in found]
    assert len(pairs) == len(set(pairs))
    for rank, rectangle in enumerate(destinations):
        received: list[tuple[int, int]] = []
        for route in found:
            if route.destination == rank:
                assert sources[route.source].contains(route.overlap)
                received += cells(route.overlap)
        assert len(received) == len(set(received))
        assert set(received) == cells(rectangle)
    check_same_coverage(sources, destinations)


def test_ranks_with_the_same_rectangle_take_turns_sending() -> None:
    left, right = LayerHeadRange(0, 2, 0, 1), LayerHeadRange(0, 2, 1, 2)
    senders = Counter(route.source for route in routes([left, left, right, right], [left, right]))
    assert senders == {0: 1, 2: 1}
    latent = [LayerHeadRange(0, 2, 0, 1)] * 4
    assert [route.source for route in routes(latent, latent)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "theirs",
    [
        [LayerHeadRange(0, 3, 0, 2)],
        [LayerHeadRange(0, 2, 0, 1)],
        [LayerHeadRange(0, 2, 0, 2), LayerHeadRange(0, 1, 0, 2)],
        [LayerHeadRange(0, 2, 0, 2), LayerHeadRange(1, 1, 0, 2)],
        [LayerHeadRange(1, 3, 0, 2)],
        [],
    ],
)
def test_ranks_with_other_layers_or_heads_are_refused(theirs: list[LayerHeadRange]) -> None:
    with pytest.raises(BadShard, match="both must have the same"):
        check_same_coverage([LayerHeadRange(0, 1, 0, 2), LayerHeadRange(1, 2, 0, 2)], theirs)


SIZES = st.sampled_from([1, 2, 3, 4, 6, 8])


@given(grids(4, 3), grids(4, 3), SIZES, SIZES, st.data())
def test_messages_cover_every_position_once_for_all_block_sizes(
    sources: list[LayerHeadRange],
    destinations: list[LayerHeadRange],
    source_size: int,
    target_size: int,
    data: st.DataObject,
) -> None:
    start = target_size * data.draw(st.integers(0, 3))
    stop = start + data.draw(st.integers(1, 30))
    message_bytes = data.draw(st.integers(1, 300))
    unit = gcd(source_size, target_size)
    shape = BlockShape(target_size, 5 * target_size).cut(unit)
    assert shape == BlockShape(source_size, 5 * source_size).cut(unit) == BlockShape(unit, 5 * unit)
    found = routes(sources, destinations)
    for rank, rectangle in enumerate(destinations):
        coverage = Coverage(rectangle, start, stop, shape)
        counts = np.zeros((4, 3, stop), np.int64)
        for route in found:
            if route.destination != rank:
                continue
            for shard in split(route.overlap, start, stop, shape, message_bytes):
                chunk = shard.rectangle
                layers = slice(chunk.first_layer, chunk.last_layer)
                heads = slice(chunk.first_head, chunk.last_head)
                counts[layers, heads, shard.start : shard.stop] += 1
                coverage.announce(shard, shape.num_bytes(shard))
                coverage.fill(shard)
        expected = np.zeros_like(counts)
        layers = slice(rectangle.first_layer, rectangle.last_layer)
        expected[layers, rectangle.first_head : rectangle.last_head, start:] = 1
        np.testing.assert_array_equal(counts, expected)
        assert coverage.complete


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(0, 10),
    st.integers(1, 60),
    st.integers(1, 2000),
)
def test_messages_complete_the_coverage_exactly(
    layers: int, heads: int, first_block: int, num_tokens: int, message_bytes: int
) -> None:
    part = LayerHeadRange(2, 2 + layers, 1, 1 + heads)
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
    # A message cannot be smaller than one block of one layer.
    smallest = heads * SHAPE.bytes_per_head
    sizes = [SHAPE.num_bytes(shard) for shard in shards]
    assert max(sizes) <= max(message_bytes, smallest)


def test_messages_are_of_even_size() -> None:
    part = LayerHeadRange(0, 8, 0, 4)
    block = SHAPE.num_bytes(Shard(part, 0, 4))
    shards = list(split(part, 0, 4 * 101, SHAPE, 10 * block))
    sizes = [SHAPE.num_bytes(shard) for shard in shards]
    assert len(sizes) == 11
    assert set(sizes) == {9 * block, 10 * block}


WHOLE = LayerHeadRange(0, 2, 0, 2)


@pytest.mark.parametrize(
    ("shard", "num_bytes", "problem"),
    [
        (Shard(WHOLE, 0, 12), 120, "this rank receives only"),
        (Shard(WHOLE, 4, 14), 120, "this rank receives only"),
        (Shard(WHOLE, 8, 8), 0, "this rank receives only"),
        (Shard(LayerHeadRange(0, 3, 0, 2), 4, 8), 60, "this rank receives only"),
        (Shard(LayerHeadRange(0, 2, 2, 3), 4, 8), 20, "this rank receives only"),
        (Shard(LayerHeadRange(1, 1, 0, 2), 4, 8), 0, "this rank receives only"),
        (Shard(WHOLE, 5, 8), 40, "expected multiples of the block size"),
        (Shard(WHOLE, 4, 7), 40, "expected multiples of the block size"),
        (Shard(WHOLE, 4, 8), 39, "39 bytes, but .* need 40"),
        (Shard(WHOLE, 4, 13), 1 << 40, "bytes, but .* need 120"),
    ],
)
def test_message_that_does_not_fit_its_transfer_is_refused(
    shard: Shard, num_bytes: int, problem: str
) -> None:
    coverage = Coverage(WHOLE, 4, 13, SHAPE)
    with pytest.raises(BadShard, match=problem):
        coverage.announce(shard, num_bytes)
    coverage.announce(Shard(WHOLE, 4, 13), 120)
    assert coverage.announced


def test_message_that_repeats_an_earlier_one_is_refused() -> None:
    coverage = Coverage(WHOLE, 4, 13, SHAPE)
    coverage.announce(Shard(WHOLE, 4, 8), 40)
    for shard in (Shard(WHOLE, 4, 8), Shard(LayerHeadRange(1, 2, 0, 2), 4, 13)):
        with pytest.raises(BadShard, match="repeats"):
            coverage.announce(shard, SHAPE.num_bytes(shard))
    assert not coverage.announced
