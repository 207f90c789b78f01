"""Compares the Triton kernels and launcher of paged attention with a float64 reference."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.attention import triton_plan, work_items
from penstock.kernels.attention.op import (
    AttentionPlan,
    paged_attention,
    plan_attention,
    plan_attention_on_device,
)
from penstock.kernels.attention.score_mod import PLAIN, ScoreMod
from penstock.kernels.attention.triton_launch import Layout
from penstock.kernels.attention.triton_plan import TiledPlan, TiledPlanner
from penstock.kernels.checks import E4M3
from penstock.kernels.kv_cache.format import FORMATS, to_cache
from tests.support.attention import (
    check,
    check_one_path,
    check_prefix,
    compare,
    exactly,
    make_case,
    shared_batch,
    small_tiles,
)
from tests.support.batches import Batch
from tests.support.devices import DEVICE, ON_GPU, exact_products

pytestmark = pytest.mark.interpreted

RAGGED = [(1, 1), (5, 5), (1, 33), (0, 9), (1, 64), (20, 50), (1, 65), (2, 40), (9, 9)]
"""(query tokens, context length) of each sequence: chunks without earlier context, decodes, edges
of partitions and tiles, and an empty chunk."""


@pytest.mark.parametrize("window", [0, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_ragged_batch(window: int, dtype: torch.dtype) -> None:
    check(RAGGED, window=window, dtype=dtype)


SINKS = torch.tensor([0.3, -2.0, 4.0], device=DEVICE)
SLOPES = torch.tensor([0.5, 0.0, 0.03], device=DEVICE)


@pytest.mark.parametrize("window", [0, 21])
@pytest.mark.parametrize(
    "scores",
    [
        ScoreMod(scale=0.4, cap=1.5),
        ScoreMod(sinks=SINKS),
        ScoreMod(slopes=SLOPES),
        ScoreMod(scale=0.9, cap=0.7, sinks=torch.full_like(SINKS, -torch.inf), slopes=SLOPES),
    ],
)
def test_score_mods(scores: ScoreMod, window: int) -> None:
    check([(1, 33), (13, 40), (1, 1), (1, 70)], scores=scores, window=window)


@pytest.mark.parametrize(
    ("heads", "block_size"),
    [
        ((2, 1, 64), 16),
        ((1, 4, 80), 8),
        ((1, 2, 96), 1),
        ((1, 5, 112), 32),
        ((2, 8, 128), 16),
        ((1, 2, 256), 64),
        ((1, 20, 16), 3),  # the query heads of one token need more than one tile
        ((3, 1, 6), 5),
    ],
)
def test_head_and_block_sizes(heads: tuple[int, int, int], block_size: int) -> None:
    check([(1, 34), (19, 30), (2, 2)], heads, block_size)


@settings(max_examples=10)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 24), st.integers(0, 60)).map(lambda pair: (pair[0], sum(pair))),
        min_size=1,
        max_size=4,
    ).filter(lambda lengths: any(query for query, _ in lengths)),
    heads=st.tuples(st.integers(1, 2), st.integers(1, 5), st.sampled_from([16, 24])),
    block_size=st.sampled_from([1, 7, 16, 64]),
    window=st.sampled_from([0, 1, 15, 16, 33, 1000]),
)
def test_any_batch(
    lengths: list[tuple[int, int]], heads: tuple[int, int, int], block_size: int, window: int
) -> None:
    check(lengths, heads, block_size, window)


def test_no_query_tokens() -> None:
    query, layer, batch = make_case([(0, 5), (0, 0)], (1, 3, 16), 16)
    assert paged_attention(query, layer, plan_attention(*batch, layer)).shape == (0, 3, 16)


def test_default_tile_sizes() -> None:
    """Use the tile sizes of a GPU, with partitions of 512 positions."""
    query, layer, batch = make_case([(1, 513), (40, 90), (1, 512)], (1, 4, 64), 16, torch.float16)
    found = paged_attention(query, layer, plan_attention(*batch, layer))
    compare(found, exactly(query, layer, batch, 0, PLAIN))


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_codes_with_scales(name: str, dtype: torch.dtype, window: int) -> None:
    scores = ScoreMod(cap=2.0, sinks=torch.randn(4, device=DEVICE))
    for block_size in (16, 5):
        lengths = [(1, 40), (11, 20), (1, 9), (1, 70)]
        check(lengths, (2, 2, 32), block_size, window, scores, dtype, cached=name)


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("magnitude", [2.0**-10, 2.0**10])
def test_weights_of_float16_do_not_underflow_with_small_scales(name: str, magnitude: float) -> None:
    query, layer, batch = make_case([(1, 40), (1, 200)], (1, 2, 16), 16, torch.float16)
    layer[1] = (layer[1].float() * magnitude).half()
    layer = to_cache(layer, FORMATS[name])
    with small_tiles():
        found = paged_attention(query, layer, plan_attention(*batch, layer))
    exact = exactly(query, layer, batch, 0, PLAIN)
    error = (found.double().cpu() - exact).abs().max()
    assert error <= 2e-3 * magnitude


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_one_path_over_codes_with_scales(name: str) -> None:
    pieces = [(0, 1), (3, 30), (49, 1)]
    check_one_path([(50, 110), (1, 70)], pieces, 0, PLAIN, cached=name)


@pytest.mark.parametrize("sinks", [None, SINKS])
def test_a_shared_prefix_is_read_once(sinks: Tensor | None) -> None:
    check_prefix(11, 80, [97, 81, 130], 64, ScoreMod(sinks=sinks))


def test_alibi_slopes_are_correct_with_a_shared_prefix() -> None:
    check_prefix(11, 80, [97, 81, 130], 64, ScoreMod(slopes=SLOPES))


def test_a_plan_with_a_shared_prefix_computes_layers_with_and_without_alibi_slopes() -> None:
    batch, num_blocks = shared_batch(11, 80, [97, 81, 130])
    query, layer = torch.randn(11, 3, 16), torch.randn(2, num_blocks, 1, 16, 16)
    with small_tiles():
        plan = plan_attention(*batch, layer, use_cascade=True)
        for scores in (PLAIN, ScoreMod(slopes=SLOPES), PLAIN):
            found = paged_attention(query, layer, plan, scores)
            compare(found, exactly(query, layer, batch, 0, scores))


@pytest.mark.parametrize(
    ("num_tokens", "prefix", "contexts", "window", "shared"),
    [
        (8, 96, [97], 0, 96),
        # The last position is each sequence's own token, so it is not part of the shared prefix.
        (8, 96, [96], 0, 64),
        (8, 96, [97, 33], 0, 32),
        (8, 16, [97], 0, 0),
        (8, 0, [97], 0, 0),
        (7, 96, [97], 0, 0),
        (8, 96, [97], 50, 0),
    ],
)
def test_length_of_the_shared_prefix(
    num_tokens: int, prefix: int, contexts: list[int], window: int, shared: int
) -> None:
    check_prefix(num_tokens, prefix, contexts, shared, window=window)


def test_a_batch_with_a_chunk_shares_no_prefix() -> None:
    _, layer, batch = make_case([(1, 80)] * 8 + [(3, 80)], (1, 3, 16), 16)
    batch[2][:, :4] = batch[2][0, :4]
    with small_tiles():
        assert shared_positions(plan_attention(*batch, layer, use_cascade=True)) == 0


def shared_positions(plan: AttentionPlan) -> int:
    assert isinstance(plan.backend, TiledPlan)
    return plan.backend.prefix


def captured(
    batch: Batch, layer: Tensor, planner: TiledPlanner, max_context: int, window: int
) -> AttentionPlan:
    """Plan a decode step for capture: its block tables are as wide as `max_context` requires."""
    starts, contexts, tables = (torch.from_numpy(array).to(DEVICE) for array in batch)
    num_columns = -(-max_context // layer.shape[3])
    tables = torch.nn.functional.pad(tables, (0, num_columns - tables.shape[1]), value=-1)
    planner.prepare(batch[0], batch[1], is_captured=True)
    return plan_attention_on_device(starts, contexts, tables, layer, planner, max_context, window)


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize("one_path", [False, True])
def test_one_graph_computes_steps_of_any_contexts(one_path: bool, window: int) -> None:
    """Prepare a step of other lengths, then launch the captured kernels again."""
    query, layer, batch = make_case([(1, 70), (1, 200), (1, 33), (1, 5)], (2, 3, 16), 16)
    planner = TiledPlanner(one_path)
    with small_tiles(), exact_products():
        contexts = torch.from_numpy(batch[1]).to(DEVICE)
        plan = captured((batch[0], np.ones(4, np.int32), batch[2]), layer, planner, 400, window)
        assert isinstance(plan.backend, TiledPlan)
        paged_attention(query, layer, plan)
        (layout,) = plan.backend.layouts.values()
        buffers = [tensor.data_ptr() for tensor in layout.work]
        for lens in ([70, 200, 33, 5], [1, 1, 30, 1], [70, 1, 1, 5], [2, 199, 1, 1]):
            batch[1][:] = lens
            plan.backend.batch.context_lens.copy_(contexts.new_tensor(lens))
            planner.prepare(batch[0], batch[1], is_captured=True)
            found = paged_attention(query, layer, plan)
            assert plan.backend.layouts == {next(iter(plan.backend.layouts)): layout}
            assert [tensor.data_ptr() for tensor in layout.work] == buffers
            compare(found, exactly(query, layer, batch, window, PLAIN))
            if one_path:
                alone = plan_attention(*batch, layer, window, one_path)
                assert torch.equal(paged_attention(query, layer, alone), found)


def test_graphs_of_other_numbers_of_rows_are_not_filled() -> None:
    _, layer, batch = make_case([(1, 70), (1, 9)], (2, 3, 16), 16)
    planner = TiledPlanner()
    with small_tiles():
        plan = captured(batch, layer, planner, 100, 0)
        assert captured(batch, layer, planner, 100, 0).backend.layouts is plan.backend.layouts  # type: ignore[attr-defined]
        assert captured(batch, layer, planner, 100, 9).backend.layouts is not plan.backend.layouts  # type: ignore[attr-defined]
        planner.prepare(np.arange(2), np.array([500]), is_captured=True)


def test_planner_must_be_prepared() -> None:
    _, layer, batch = make_case([(1, 70), (1, 9)], (2, 3, 16), 16)
    starts, contexts, tables = (torch.from_numpy(array).to(DEVICE) for array in batch)
    with pytest.raises(RuntimeError, match="prepare"):
        plan_attention_on_device(starts, contexts, tables, layer, TiledPlanner(), 70)


SHORT_CHUNKS = [(20, 230), (1, 70), (13, 40), (12, 12)]


@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("scores", [PLAIN, ScoreMod(cap=0.7, sinks=SINKS, slopes=SLOPES)])
def test_short_chunks_behind_long_prefixes_are_split(scores: ScoreMod, window: int) -> None:
    query, layer, batch = make_case(SHORT_CHUNKS, (1, 3, 16), 16)
    exact = exactly(query, layer, batch, window, scores)
    with small_tiles():
        for num_programs, splits in ((1, False), (64, True)):
            with programs(num_programs):
                plan = plan_attention(*batch, layer, window)
                compare(paged_attention(query, layer, plan, scores), exact)
            assert (layout_of(plan).merge_tokens == 20) == splits


@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("scores", [PLAIN, ScoreMod(cap=0.7, sinks=SINKS, slopes=SLOPES)])
def test_one_path_bits_do_not_depend_on_the_split_of_chunks(scores: ScoreMod, window: int) -> None:
    query, layer, batch = make_case(SHORT_CHUNKS, (1, 3, 16), 16)
    with small_tiles(), exact_products():
        found = []
        for num_programs, splits in ((1, False), (64, True)):
            with programs(num_programs):
                plan = plan_attention(*batch, layer, window, one_path=True)
                found.append(paged_attention(query, layer, plan, scores))
            assert layout_of(plan).in_order == (not splits)
    assert torch.equal(*found)
    compare(found[0], exactly(query, layer, batch, window, scores))


def test_partial_sums_of_chunks_are_bounded() -> None:
    """With less memory for partial sums, chunks are split less often; with `one_path`, never."""
    query, layer, batch = make_case(SHORT_CHUNKS, (1, 3, 16), 16)
    row_bytes = 3 * 16 * 4
    exact = exactly(query, layer, batch, 0, PLAIN)
    with (
        small_tiles(),
        programs(64),
        mock.patch.object(work_items, "MAX_PARTIAL_BYTES", 100 * row_bytes),
    ):
        plan = plan_attention(*batch, layer)
        compare(paged_attention(query, layer, plan), exact)
        assert 40 <= layout_of(plan).num_partial_rows <= 110
        plan = plan_attention(*batch, layer, one_path=True)
        compare(paged_attention(query, layer, plan), exact)
        assert layout_of(plan).in_order


def layout_of(plan: AttentionPlan) -> Layout:
    assert isinstance(plan.backend, TiledPlan)
    (layout,) = plan.backend.layouts.values()
    return layout


def programs(number: int) -> AbstractContextManager[object]:
    """Make plans as for a device that runs `number` programs at a time."""
    return mock.patch.object(triton_plan, "_num_programs", return_value=number)


@pytest.mark.parametrize("window", [0, 37])
def test_one_path_bits_of_a_sequence_do_not_depend_on_the_batch(window: int) -> None:
    query, layer, batch = make_case(RAGGED, (1, 3, 16), 16, torch.float16)
    starts, contexts, tables = batch
    with small_tiles(), exact_products():
        plan = plan_attention(*batch, layer, window, one_path=True)
        batched = paged_attention(query, layer, plan)
        for b in (2, 5, 6, 7):
            tokens = slice(starts[b], starts[b + 1])
            length = np.array([0, starts[b + 1] - starts[b]], np.int32)
            single = (length, contexts[b : b + 1], tables[b : b + 1])
            for num_programs in (1, 64):
                with programs(num_programs):
                    plan = plan_attention(*single, layer, window, one_path=True)
                    alone = paged_attention(query[tokens], layer, plan)
                assert torch.equal(alone, batched[tokens])


@pytest.mark.parametrize("window", [0, 37])
@pytest.mark.parametrize("scores", [PLAIN, ScoreMod(cap=0.7, sinks=SINKS, slopes=SLOPES)])
def test_one_path_bits_do_not_depend_on_chunking(scores: ScoreMod, window: int) -> None:
    """Single tokens, and pieces that fit one tile, give the same bits as the whole chunk."""
    pieces = [(0, 1), (3, 1), (3, 30), (17, 2), (35, 15), (49, 1)]
    check_one_path([(50, 110), (1, 70), (9, 9)], pieces, window, scores)


def test_one_path_shares_no_prefix() -> None:
    check_prefix(8, 96, [97], 0, one_path=True)


def test_nan_in_a_slot_affects_its_own_sequence_only() -> None:
    query, layer, batch = make_case([(1, 40), (1, 40), (9, 20)], (1, 2, 16), 16)
    layer[1, batch[2][1, 1], 0, 3] = torch.nan
    with small_tiles():
        found = paged_attention(query, layer, plan_attention(*batch, layer))
    assert found[0].isfinite().all()
    assert found[1].isnan().all()
    assert found[2:].isfinite().all()


def refusals() -> dict[str, Callable[[Tensor, Tensor, Batch], object]]:
    wrong = torch.zeros(4, device=DEVICE)

    def call(query: Tensor, layer: Tensor, batch: Batch, **other: object) -> object:
        return paged_attention(query, layer, plan_attention(*batch, layer), **other)  # type: ignore[arg-type]

    def planned(**change: object) -> Callable[[Tensor, Tensor, Batch], object]:
        def plan(query: Tensor, layer: Tensor, batch: Batch) -> object:
            names = ("query_starts", "context_lens", "block_tables")
            return plan_attention(**{**dict(zip(names, batch, strict=True)), **change}, layer=layer)  # type: ignore[arg-type]

        return plan

    def changed(array: int, at: tuple[int, ...], value: int) -> Callable[..., object]:
        def plan(query: Tensor, layer: Tensor, batch: Batch) -> object:
            batch[array][at] = value
            return plan_attention(*batch, layer)

        return plan

    return {
        r"query has shape \[9, 6, 16\]: expected \[10, Hq, 16\]": lambda q, c, b: call(q[1:], c, b),
        r"query has shape \[10, 6, 8\]: expected \[10, Hq, 16\]": lambda q, c, b: call(
            q[..., :8], c, b
        ),
        "query has 5 heads: expected a multiple of 2": lambda q, c, b: call(q[:, :5], c, b),
        "query has dtype float16: expected float32": lambda q, c, b: call(q.half(), c, b),
        "query has stride .* in the last dimension": lambda q, c, b: call(
            q.mT.contiguous().mT, c, b
        ),
        "query has stride .* between heads": lambda q, c, b: call(q[:, ::3], c, b),
        "layer has strides .*: expected a contiguous tensor": lambda q, c, b: call(
            q, c.transpose(2, 3).contiguous().transpose(2, 3), b
        ),
        r"layer has shape .*: expected \[2, N, H, S, W\]": lambda q, c, b: call(q, c[:1], b),
        "layer has shape": lambda q, c, b: paged_attention(
            q, c[:, 1:].clone(), plan_attention(*b, c)
        ),
        r"sinks has shape .*: expected \[6\]": lambda q, c, b: call(
            q, c, b, scores=ScoreMod(sinks=wrong)
        ),
        r"slopes has shape .*: expected \[6\]": lambda q, c, b: call(
            q, c, b, scores=ScoreMod(slopes=wrong)
        ),
        r"query has shape \[10, 6, 16\]: expected \[10, Hq, 14\]": lambda q, c, b: call(
            q, c.to(E4M3), b
        ),
        "query_starts has shape .* and block_tables has shape": planned(
            query_starts=np.zeros(1, np.int32)
        ),
        "query_starts is .*: expected a list that starts with 0": changed(0, (1,), 11),
        r"context_lens\[1\] is 8: expected at least 9": changed(1, (1,), 8),
        "block_tables has 4 columns: expected at least 63": changed(1, (0,), 1000),
        r"block_tables\[0, 2\] is 8: expected a block number from 0 to 7": changed(2, (0, 2), 8),
        r"block_tables\[1, 0\] is -1: expected a block number from 0 to 7": changed(2, (1, 0), -1),
    }


@pytest.mark.parametrize("message", refusals())
def test_arguments_that_would_read_out_of_bounds_are_refused(message: str) -> None:
    query, layer, batch = make_case([(1, 40), (9, 20)], (2, 3, 16), 16)
    with pytest.raises(ValueError, match=message):
        refusals()[message](query, layer, batch)


@pytest.mark.skipif(ON_GPU, reason="a GPU computes bfloat16")
def test_bfloat16_is_refused_in_the_interpreter() -> None:
    query, layer, batch = make_case([(1, 40), (9, 20)], (2, 3, 16), 16, torch.bfloat16)
    with pytest.raises(TypeError, match="bfloat16"):
        paged_attention(query, layer, plan_attention(*batch, layer))


def test_invalid_device_tensors_are_refused() -> None:
    _, layer, batch = make_case([(1, 40), (9, 20)], (2, 3, 16), 16)
    starts, contexts, tables = (torch.from_numpy(array).to(DEVICE) for array in batch)
    for bad, message in (
        ((starts[1:], contexts, tables), "query_starts has shape"),
        ((starts, contexts.long(), tables), "context_lens has dtype .*: expected int32"),
        ((starts, contexts, tables[:1]), "block_tables has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            plan_attention_on_device(*bad, layer, TiledPlanner(), 40)
    with pytest.raises(ValueError, match="max_context is 65: expected at most 64"):
        plan_attention_on_device(starts, contexts, tables, layer, TiledPlanner(), 65)
