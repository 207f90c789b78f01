"""Work items of attention cover every position once, in equal parts, for any batch."""

from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.attention import work_items as sound
from penstock.kernels.attention.work_items import (
    SPLIT,
    StepWork,
    WorkShape,
)
from tests.support.mutants import Change, mutant_of

H100 = 132  # number of multiprocessors of an H100

SHAPES = st.builds(
    lambda heads, group, few, chunk, programs, row_bytes: WorkShape(
        heads, group, few, max(few, chunk), programs, 2 * programs, row_bytes
    ),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([1, 3, 4, 40]),
    st.sampled_from([16, 32]),
    st.sampled_from([32, 128]),
    st.sampled_from([1, 7, 132, 264]),
    st.sampled_from([1, 1 << 14, 1 << 17]),
)

CONTEXTS = st.one_of(st.integers(0, 300), st.integers(0, 5000), st.integers(0, 40_000))

LENGTHS = st.lists(
    st.tuples(st.one_of(st.integers(0, 5), st.integers(0, 600)), CONTEXTS).map(
        lambda pair: (pair[0], sum(pair))
    ),
    max_size=8,
)
"""(query tokens, context length) of each sequence."""

WINDOWS = st.sampled_from([0, 1, 100, 128, 1000])


def make(
    lengths: list[tuple[int, int]],
    window: int,
    one_path: bool,
    shape: WorkShape,
    prefix: int = 0,
    module: Any = sound,
) -> StepWork:
    starts = np.cumsum([0, *(tokens for tokens, _ in lengths)]).astype(np.int32)
    contexts = np.array([context for _, context in lengths], np.int32)
    if one_path:
        shape = shape._replace(chunk_rows=shape.few_rows)
    work: StepWork = module.make_step_work(starts, contexts, window, prefix, one_path, shape)
    return work


def check(
    work: StepWork,
    lengths: list[tuple[int, int]],
    window: int,
    one_path: bool,
    shape: WorkShape,
    prefix: int = 0,
) -> None:
    """Compare a step's items with those of a plain loop over its sequences."""
    used = np.zeros(work.num_partial_rows, np.int64)
    longest = 0
    for number, (tokens, context) in enumerate(lengths):
        few, chunk = (items[items[:, 0] == number] for items in (work.few, work.chunks))
        assert not (len(few) and len(chunk)), "a sequence has items of one kind"
        mine = few if len(few) else chunk
        rows = shape.few_rows if len(few) or one_path else shape.chunk_rows
        num_tiles = -(-tokens * shape.group // rows)
        low = max(context - tokens - window + 1 if window else 0, prefix)
        first, count = work.merges[number].tolist()
        if tokens:
            longest = max(longest, tokens if count else 0)
        else:
            assert count == 0
        is_few = tokens <= max(1, shape.few_rows // shape.group)
        if not one_path and tokens:
            assert len(few if is_few else chunk), "a sequence has items of its kind"
        for tile in range(num_tiles):
            parts = sorted(map(tuple, mine[mine[:, 1] == tile][:, 2:].tolist()))
            assert parts, f"tile {tile} of sequence {number} has no item"
            assert parts[0][0] <= low
            assert parts[-1][1] >= context
            for (_, end, _), (begin, _, _) in pairwise(parts):
                assert end == begin, "every position is in one item"
            if not (work.in_order and len(chunk)):
                assert all(begin < context and end > low for begin, end, _ in parts), "idle item"
                assert all(begin % 64 == 0 for begin, _, _ in parts), "starts within a tile"
            is_merged = len(parts) > 1 or prefix > 0
            assert count == (len(parts) if is_merged else 0)
            found = [row for _, _, row in parts]
            expected = [first + index * tokens for index in range(len(parts))]
            assert found == (expected if is_merged else [-1])
        for index in range(count):
            used[first + index * tokens : first + (index + 1) * tokens] += 1
        assert len(mine) <= num_tiles * max(1, len(set(mine[:, 2].tolist())))
    assert (used == 1).all(), "every partial row belongs to one partition"
    assert work.merge_tokens == longest


def check_shares(work: StepWork, one_path: bool, shape: WorkShape) -> None:
    """Check that each item belongs to one worker, and that workers have nearly equal costs."""
    starts = work.worker_starts
    assert len(starts) == shape.num_workers + 1
    assert starts[0] == 0
    assert starts[-1] == len(work.few)
    assert (np.diff(starts) >= 0).all()
    if not len(work.few):
        return
    costs = work.few[:, 3] - work.few[:, 2] if not one_path else np.ones(len(work.few))
    unit = 1 if one_path else sound.QUANTUM
    loads = [costs[begin:end].sum() for begin, end in pairwise(starts)]
    share = -(-costs.sum() // (unit * shape.num_workers)) * unit
    # If a token has several tiles, each tile has an item of its own.
    tall = shape.group > shape.few_rows
    assert max(loads) <= share + (costs.max() if tall else 0)


@settings(max_examples=150)
@given(LENGTHS, WINDOWS, st.booleans(), SHAPES)
def test_items_cover_every_position_of_every_tile_once(
    lengths: list[tuple[int, int]], window: int, one_path: bool, shape: WorkShape
) -> None:
    work = make(lengths, window, one_path, shape)
    check(work, lengths, window, one_path, shape)
    check_shares(work, one_path, shape)
    chunk_rows = sum(
        count * lengths[number][0]
        for number, (_, count) in enumerate(work.merges.tolist())
        if lengths[number][0] * shape.group > max(shape.few_rows, shape.group)
    )
    assert chunk_rows * shape.row_bytes <= sound.MAX_PARTIAL_BYTES


@settings(max_examples=50)
@given(
    st.lists(st.integers(1, 3000).map(lambda own: (1, 2 * SPLIT + own)), min_size=1, max_size=20),
    SHAPES,
)
def test_positions_of_a_shared_prefix_are_left_out(
    lengths: list[tuple[int, int]], shape: WorkShape
) -> None:
    check(make(lengths, 0, False, shape, 2 * SPLIT), lengths, 0, False, shape, 2 * SPLIT)


@settings(max_examples=100)
@given(LENGTHS.filter(bool), WINDOWS, SHAPES, st.sampled_from([1, 10_000]))
def test_one_path_partitions_depend_on_the_sequence_only(
    lengths: list[tuple[int, int]], window: int, shape: WorkShape, num_programs: int
) -> None:
    """Each item of `few` is one partition, whose bounds depend on neither batch nor device."""
    work = make(lengths, window, True, shape)
    for number, own in enumerate(lengths):
        other = shape._replace(few_programs=num_programs, chunk_programs=num_programs)
        alone = make([own], window, True, other)
        batched = work.few[work.few[:, 0] == number][:, 1:4]
        assert (batched[:, 1:] % SPLIT == 0).all()
        assert (batched[:, 2] - batched[:, 1] == SPLIT).all()
        if len(batched) and len(alone.few):
            assert batched.tolist() == alone.few[:, 1:4].tolist()


@settings(max_examples=50)
@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=40), WINDOWS, st.booleans(), SHAPES)
def test_decode_steps_fit_the_buffers_of_a_graph(
    contexts: list[int], window: int, one_path: bool, shape: WorkShape
) -> None:
    limits = (len(contexts), 20_000, window)
    num_items, num_rows = sound.decode_capacity(*limits, one_path, shape)
    work = make([(1, context) for context in contexts], window, one_path, shape)
    assert len(work.few) <= num_items
    assert work.num_partial_rows <= num_rows
    assert not len(work.chunks)


LLAMA = WorkShape(8, 4, 16, 128, 2 * H100, 2 * H100, 32 * 128 * 4)


def test_a_graph_for_a_long_context_has_small_buffers() -> None:
    num_items, num_rows = sound.decode_capacity(256, 131_072, 0, False, LLAMA)
    assert num_items == num_rows == 256 + 2 * 33 + 1
    assert num_rows * LLAMA.row_bytes < 6 << 20


@pytest.mark.parametrize(
    ("tokens", "context", "programs"),
    [(16, 32_768, 256), (64, 32_768, 256), (64, 100_000, 256), (256, 32_768, 256), (64, 1000, 16)],
)
def test_short_chunks_behind_long_prefixes_fill_the_device(
    tokens: int, context: int, programs: int
) -> None:
    work = make([(tokens, context)], 0, False, LLAMA)
    assert 0.85 * programs <= len(work.chunks) * LLAMA.num_kv_heads <= 1.15 * programs
    whole = make([(tokens, context)], 0, False, LLAMA._replace(chunk_programs=1))
    assert len(whole.chunks) == -(-tokens * 4 // 128)


def test_long_chunks_are_not_split() -> None:
    work = make([(8192, 8192)], 0, False, LLAMA)
    assert work.num_partial_rows == 0
    # The first item is the tile with the longest context.
    assert (work.chunks[:, 1] == np.arange(256)[::-1]).all()


def test_one_path_splits_chunks_that_do_not_fill_the_device() -> None:
    invariant = LLAMA._replace(few_rows=32, chunk_rows=32)
    for tokens, context, in_order in (
        (64, 32_768, False),
        (64, 40_000, True),  # The partial sums would need more than MAX_PARTIAL_BYTES.
        (1024, 4096, True),
        (64, 512, True),
    ):
        work = make([(tokens, context)], 0, True, invariant)
        assert work.in_order == in_order
        assert bool(len(work.chunks)) == in_order


EXAMPLES: list[tuple[list[tuple[int, int]], int, bool, WorkShape, int]] = [
    ([(1, 1000), (0, 50), (1, 130), (1, 5)], 0, False, LLAMA._replace(few_programs=24), 0),
    ([(1, 5000), (1, 700)], 600, False, LLAMA._replace(few_programs=24), 0),
    ([(1, 5000), (3, 5000), (70, 9000), (40, 1200)], 0, False, LLAMA, 0),
    ([(70, 9000), (40, 3000)], 2000, False, LLAMA, 0),
    ([(1, 5000), (70, 9000)], 0, True, LLAMA, 0),
    ([(1, 5000), (70, 9000)], 700, True, LLAMA._replace(few_programs=8), 0),
    ([(1, 5000)], 393, False, LLAMA, 0),  # the window begins at the last position of a partition
    ([(1, 1100), (1, 3000), (1, 1030)], 0, False, LLAMA, 1024),
    ([(1, 3000), (1, 90)], 0, False, LLAMA._replace(num_kv_heads=1, group=40), 0),
]

MUTANTS: dict[str, Change] = {
    "window": ("- lengths - window + 1", "- lengths - window + 2"),
    "prefix": ("low = np.maximum(low, prefix)", "low = np.maximum(low, prefix + SPLIT)"),
    "few": ("(lengths <= max(1, shape.few_rows", "(lengths < max(1, shape.few_rows"),
    "tiles of few": (
        "* shape.group // shape.few_rows)\n    chunk",
        "// shape.few_rows)\n    chunk",
    ),
    "tiles of chunks": ("few_rows)\n    chunk_tiles = -(-", "few_rows)\n    chunk_tiles = -(1 + -"),
    "few in order": ("is_few if in_order else lengths > 0", "is_few"),
    "all merged": ("0, bool(prefix))", "0, False)"),
    "rows of chunks": (
        "_partial_rows(chunks, lengths, num_rows,",
        "_partial_rows(chunks, lengths, 0,",
    ),
    "merges": ("merges = few_merges + chunk_merges", "merges = few_merges"),
    "tokens of merges": ("lengths[merges[:, 1] > 0]", "lengths[merges[:, 1] > 9]"),
    "cost": ("cost = (few_items[:, 3] - few_items[:, 2]) // QUANTUM", "pass"),
    "end of a cut": ("begin, begin + size)", "begin, begin + size - 64)"),
    "first cut": ("first = low // SPLIT * SPLIT", "first = low // SPLIT * SPLIT + SPLIT"),
    "number of cuts": ("-(-(high - first) // size) * chosen", "((high - first) // size) * chosen"),
    "one more cut": (
        "-(-(high - first) // size) * chosen",
        "((high - first) // size + 2) * chosen",
    ),
    "index of a cut": ("(np.cumsum(counts) - counts)[sequence]", "np.cumsum(counts)[sequence]"),
    "first quantum": ("first = low // QUANTUM", "first = low // QUANTUM + 1"),
    "quanta": ("-(-high // QUANTUM) - first", "high // QUANTUM - first"),
    "share": ("quota = max(1, -(-total * height", "quota = max(1, -(-2 * total * height"),
    "sequence of a cut": ('cuts, side="right") - 1', 'cuts, side="left")'),
    "last cut": ("np.append(cuts[1:], total)", "np.append(cuts[1:], total + 1)"),
    "one partition": ("(0 if all_merged else 1)", "(0 if all_merged else 2)"),
    "rows": ("ends = first_row + np.cumsum(sizes)", "ends = first_row + np.cumsum(sizes) + 1"),
    "first rows": ("np.cumsum(sequence_rows) - sequence_rows", "np.cumsum(sequence_rows)"),
    "number of rows": ("first_row + int(sizes.sum())", "first_row + int(sizes.sum()) + 1"),
    "tile": (
        "tile = np.arange(len(piece)) - (np.cumsum(counts) - counts)[piece]",
        "tile = 0 * piece",
    ),
    "share of a worker": ("worker = (ends - costs) // quota", "worker = ends // (quota + 1)"),
    "bytes": ("shape.row_bytes <= MAX_PARTIAL_BYTES:", "shape.row_bytes <= 1 << 40:"),
}


def check_examples(module: ModuleType) -> None:
    for lengths, window, one_path, shape, prefix in EXAMPLES:
        work = make(lengths, window, one_path, shape, prefix, module)
        check(work, lengths, window, one_path, shape, prefix)
        check_shares(work, one_path, shape)
    wide = LLAMA._replace(row_bytes=1 << 17)
    work = make([(32, 200_000)], 0, False, wide, module=module)
    assert 0 < work.num_partial_rows * wide.row_bytes <= sound.MAX_PARTIAL_BYTES


def test_examples_pass_unchanged() -> None:
    check_examples(sound)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_detected(name: str, tmp_path: Path) -> None:
    mutant = mutant_of(sound, MUTANTS[name], tmp_path)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check_examples(mutant)
