"""Paged attention on a CPU, which gathers the KV or reads it in place, equals its reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.attention import op as attention
from penstock.kernels.attention import torch_gather
from penstock.kernels.attention.cpu_amx import support
from penstock.kernels.attention.op import paged_attention, paged_attention_reference, plan_attention
from penstock.kernels.attention.score_mod import PLAIN, ScoreMod
from penstock.kernels.attention.torch_gather import GatheredPlan
from penstock.kernels.cpu_common.cpu_features import has_amx
from penstock.kernels.kv_cache.format import FORMATS, to_cache
from tests.support.batches import Batch, make_batch, poison


@contextmanager
def forced_form(
    reads_in_place: bool, max_in_place: int = torch_gather.MAX_PAGED_CONTEXT
) -> Iterator[None]:
    """Make plans read single tokens and contexts of up to `max_in_place` positions in place.

    If `reads_in_place` is False, plans gather all KV instead.
    """
    with (
        mock.patch.object(attention, "supports_cpu_paged", return_value=reads_in_place),
        mock.patch.object(torch_gather, "MAX_PAGED_CONTEXT", max_in_place),
    ):
        yield


def check(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int, int],
    block_size: int,
    window: int,
    scores: ScoreMod = PLAIN,
) -> None:
    num_heads, group, head_dim = heads
    batch, num_blocks = make_batch(lengths, block_size, seed=len(lengths))
    torch.manual_seed(0)
    layer = torch.randn(2, num_blocks, num_heads, block_size, head_dim)
    poison(layer, batch)
    query = torch.randn(int(batch[0][-1]), num_heads * group, head_dim)
    wide = replace(
        scores,
        sinks=None if scores.sinks is None else scores.sinks.double(),
        slopes=None if scores.slopes is None else scores.slopes.double(),
    )
    exact = paged_attention_reference(query.double(), layer.double(), *batch, window, wide)
    forms = ((False, 0, False), (True, 0, False), (True, 25, False), (True, 512, True))
    for reads_in_place, max_in_place, one_path in forms:
        with forced_form(reads_in_place, max_in_place):
            plan = plan_attention(*batch, layer, window, one_path)
        found = paged_attention(query, layer, plan, scores)
        torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)


lengths = st.lists(
    st.tuples(st.integers(1, 20), st.integers(0, 60)).map(lambda pair: (pair[0], sum(pair))),
    min_size=1,
    max_size=6,
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    lengths=lengths,
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 6, 16])),
    block_size=st.sampled_from([1, 3, 16]),
    window=st.sampled_from([0, 1, 7, 16, 1000]),
)
def test_any_ragged_batch(
    lengths: list[tuple[int, int]], heads: tuple[int, int, int], block_size: int, window: int
) -> None:
    check(lengths, heads, block_size, window)


@pytest.mark.parametrize("window", [0, 5, 40])
def test_decodes_without_prefills(window: int) -> None:
    check([(1, 1), (1, 16), (1, 17), (1, 90)], (2, 3, 8), 16, window)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize(
    "scores",
    [
        ScoreMod(scale=0.4),
        ScoreMod(scale=0.9, cap=1.5),
        ScoreMod(sinks=torch.tensor([0.3, -2.0, 4.0, 0.0, 1.0, -torch.inf])),
        ScoreMod(cap=0.7, sinks=torch.arange(6.0)),
        ScoreMod(slopes=torch.tensor([0.5, 0.0, 0.25, 2.0, 0.1, 0.03])),
        ScoreMod(cap=0.7, sinks=torch.arange(6.0), slopes=torch.arange(6.0) / 9),
    ],
)
def test_score_mods(scores: ScoreMod, window: int) -> None:
    lengths = [(1, 1), (7, 7), (1, 30), (5, 21), (1, 17)]
    check(lengths, (2, 3, 8), 4, window, scores)


def test_decodes_of_very_different_lengths_are_padded_separately() -> None:
    lengths = [(1, 5), (1, 1500), (1, 30), (1, 1400), (1, 7)]
    batch, num_blocks = make_batch(lengths, 16, 0)
    layer = torch.zeros(2, num_blocks, 4, 16, 64)
    with forced_form(reads_in_place=False):
        plan = plan_attention(*batch, layer).backend
    assert isinstance(plan, GatheredPlan)
    assert len(plan.decodes) == 2
    assert len(plan.gathered) < 2 * 4 * (94 + 94 + 3)
    check(lengths, (4, 1, 64), 16, 0)


@pytest.mark.parametrize(
    ("name", "head_dim", "block_size", "in_place"),
    [
        ("bfloat16", 64, 16, True),
        ("int8", 128, 32, True),
        ("bfloat16", 80, 16, False),
        ("bfloat16", 64, 8, False),
        ("float32", 64, 16, False),
        ("fp8", 64, 16, False),
    ],
)
@pytest.mark.parametrize("amx", [True, False])
def test_long_chunks_are_read_in_place_with_amx(
    name: str, head_dim: int, block_size: int, in_place: bool, amx: bool
) -> None:
    batch, num_blocks = make_batch([(5, torch_gather.MAX_PAGED_CONTEXT + 1)], block_size, 0)
    layer = to_cache(torch.zeros(2, num_blocks, 1, block_size, head_dim), FORMATS[name])
    with forced_form(reads_in_place=True), mock.patch.object(support, "has_amx", return_value=amx):
        plan = plan_attention(*batch, layer).backend
    assert isinstance(plan, GatheredPlan)
    assert (plan.paged is not None) == (not plan.chunks) == (in_place and amx)


def test_bfloat16() -> None:
    batch, num_blocks = make_batch([(1, 40), (9, 30)], 16, 0)
    layer = torch.randn(2, num_blocks, 2, 16, 8)
    poison(layer, batch)
    query = torch.randn(10, 4, 8)
    narrow = layer.to(torch.bfloat16)
    found = paged_attention(query.to(torch.bfloat16), narrow, plan_attention(*batch, narrow))
    expected = paged_attention_reference(query, layer, *batch)
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("reads_paged", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_codes_with_scales(
    name: str, dtype: torch.dtype, reads_paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `reads_paged`, numba loops read blocks in place; otherwise, torch dequantizes them."""
    monkeypatch.setattr(attention, "supports_cpu_paged", lambda *_: reads_paged)
    batch, num_blocks = make_batch([(1, 40), (9, 30), (4, 4), (1, 700)], 16, 0)
    features = torch.randn(2, num_blocks, 2, 16, 8) * torch.rand(2, num_blocks, 2, 16, 1) * 4
    poison(features, batch)
    layer, query = to_cache(features, FORMATS[name]), torch.randn(15, 4, 8).to(dtype)
    found = paged_attention(query, layer, plan_attention(*batch, layer, 20))
    exact = paged_attention_reference(query.double(), layer, *batch, 20)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


def attend_in_place(
    query: torch.Tensor,
    layer: torch.Tensor,
    batch: Batch,
    scores: ScoreMod = PLAIN,
    window: int = 0,
) -> torch.Tensor:
    plan = plan_attention(*batch, layer, window, one_path=True)
    assert isinstance(plan.backend, GatheredPlan)
    assert plan.backend.paged is not None
    return paged_attention(query, layer, plan, scores)


@pytest.mark.parametrize("window", [0, 9, 33])
@pytest.mark.parametrize("scores", [PLAIN, ScoreMod(cap=0.7, sinks=torch.arange(6.0))])
def test_in_place_bits_do_not_depend_on_chunking(scores: ScoreMod, window: int) -> None:
    lengths = [(1, 1), (9, 90), (33, 33), (8, 64), (1, 50)]
    batch, num_blocks = make_batch(lengths, 16, 0)
    starts, _, tables = batch
    layer, query = torch.randn(2, num_blocks, 2, 16, 24), torch.randn(int(starts[-1]), 6, 24)
    whole = attend_in_place(query, layer, batch, scores, window)
    exact = paged_attention_reference(query, layer, *batch, window, scores)
    torch.testing.assert_close(whole, exact, rtol=1e-5, atol=1e-5)
    for threads in (1, 3):
        with mock.patch.object(torch, "get_num_threads", return_value=threads):
            assert torch.equal(attend_in_place(query, layer, batch, scores, window), whole)
    for b, (length, context) in enumerate(lengths):
        for token in range(length):
            row = int(starts[b]) + token
            context_len = np.array([context - length + token + 1], np.int32)
            one = (np.array([0, 1], np.int32), context_len, tables[b : b + 1])
            assert torch.equal(
                attend_in_place(query[row : row + 1], layer, one, scores, window)[0], whole[row]
            )


@pytest.mark.parametrize(
    ("num_heads", "group", "head_dim"),
    [(2, 1, 64), (1, 5, 36), (1, 20, 8), (1, 2, 7), (1, 130, 80)],
)
def test_in_place_one_row_per_simd_lane_has_the_bits_of_a_single_row(
    num_heads: int, group: int, head_dim: int
) -> None:
    batch, num_blocks = make_batch([(50, 71)], 8, 0)
    _, contexts, tables = batch
    layer = torch.randn(2, num_blocks, num_heads, 8, head_dim)
    query = torch.randn(50, num_heads * group, head_dim)
    scores = ScoreMod(slopes=torch.linspace(0, 0.3, num_heads * group))
    whole = attend_in_place(query, layer, batch, scores)
    exact = paged_attention_reference(query.double(), layer.double(), *batch, 0, scores)
    torch.testing.assert_close(whole, exact.float(), rtol=1e-5, atol=1e-5)
    for token in (0, 1, 31, 49):
        one = np.array([0, 1], np.int32), contexts - 49 + token, tables
        assert torch.equal(
            attend_in_place(query[token : token + 1], layer, one, scores)[0], whole[token]
        )


def test_one_path_is_refused_for_unsupported_dtypes() -> None:
    batch, num_blocks = make_batch([(3, 7)], 16, 0)
    with pytest.raises(ValueError, match="batch-invariant attention is not available for"):
        plan_attention(*batch, torch.zeros(2, num_blocks, 1, 16, 8).half(), one_path=True)


NARROW_LENGTHS = [(1, 1), (9, 90), (33, 33), (1, 16), (8, 64), (1, 50), (1, 600), (20, 300)]


@pytest.mark.parametrize("window", [0, 9, 270])
@pytest.mark.parametrize(
    ("num_heads", "group", "head_dim", "block_size"),
    [
        *((2, 3, 24, 16), (1, 1, 7, 1), (1, 20, 8, 3), (2, 2, 64, 128), (1, 40, 36, 16)),
        *((1, 5, 64, 16), (2, 6, 64, 48), (1, 17, 128, 16), (2, 1, 192, 32)),
    ],
)
def test_a_bfloat16_cache_is_computed_in_float32(
    num_heads: int, group: int, head_dim: int, block_size: int, window: int
) -> None:
    """Results have the precision of float32.

    With `one_path` and without AMX, they are bitwise equal to those of a float32 cache of equal
    values.
    """
    batch, num_blocks = make_batch(NARROW_LENGTHS, block_size, 0)
    layer = torch.randn(2, num_blocks, num_heads, block_size, head_dim)
    poison(layer, batch)
    heads = torch.arange(num_heads * group)
    narrow = layer.bfloat16()
    scores = ScoreMod(scale=0.2, cap=2.0, sinks=heads / 9, slopes=heads / 1000)
    query = torch.randn(int(batch[0][-1]), num_heads * group, head_dim)
    exact = paged_attention_reference(query, narrow.float(), *batch, window, scores)
    forms = ((False, 0, False), (True, 0, False), (True, 25, False), (True, 512, True))
    for reads_in_place, max_in_place, one_path in forms:
        with forced_form(reads_in_place, max_in_place):
            plans = [plan_attention(*batch, x, window, one_path) for x in (narrow, narrow.float())]
        found = paged_attention(query, narrow, plans[0], scores)
        uses_amx = has_amx() and head_dim % 64 == 0 and block_size % 16 == 0
        # Without `one_path`, the bits of torch's kernels may depend on the strides.
        if one_path and not uses_amx:
            wide = paged_attention(query, narrow.float(), plans[1], scores)
            assert torch.equal(found, wide)
        torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [0, 33, 270])
@pytest.mark.parametrize(("group", "head_dim"), [(3, 24), (3, 64), (7, 64), (1, 128), (20, 64)])
def test_in_place_bfloat16_bits_do_not_depend_on_chunking(
    group: int, head_dim: int, window: int
) -> None:
    batch, num_blocks = make_batch(NARROW_LENGTHS, 16, 0)
    starts, _, tables = batch
    layer = torch.randn(2, num_blocks, 2, 16, head_dim).bfloat16()
    query = torch.randn(int(starts[-1]), 2 * group, head_dim)
    whole = attend_in_place(query, layer, batch, window=window)
    with mock.patch.object(torch, "get_num_threads", return_value=3):
        assert torch.equal(attend_in_place(query, layer, batch, window=window), whole)
    for b, (length, context) in enumerate(NARROW_LENGTHS):
        for token in range(length):
            row, context_len = int(starts[b]) + token, context - length + token + 1
            one = np.array([0, 1], np.int32), np.array([context_len], np.int32), tables[b : b + 1]
            single = attend_in_place(query[row : row + 1], layer, one, window=window)[0]
            assert torch.equal(single, whole[row])


def test_only_a_bfloat16_cache_may_have_another_dtype_than_the_query() -> None:
    batch, num_blocks = make_batch([(1, 7)], 16, 0)
    layer = torch.zeros(2, num_blocks, 1, 16, 8)
    for cached, dtype in ((torch.bfloat16, torch.float16), (torch.float16, torch.float32)):
        narrow = layer.to(cached)
        with pytest.raises(ValueError, match="query"):
            paged_attention(
                torch.zeros(1, 1, 8, dtype=dtype), narrow, plan_attention(*batch, narrow)
            )


CACHES = pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 8), (torch.bfloat16, 8), (torch.bfloat16, 64)]
)


@CACHES
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_in_place_nan_and_inf_in_a_slot_reach_the_output(
    dtype: torch.dtype, head_dim: int, side: int, value: float
) -> None:
    batch, num_blocks = make_batch([(1, 40), (1, 40)], 16, 0)
    layer = torch.randn(2, num_blocks, 1, 16, head_dim).to(dtype)
    query = torch.rand(2, 1, head_dim)
    layer[side, batch[2][1, 1], 0, 3] = value
    found = attend_in_place(query, layer, batch)
    assert found[0].isfinite().all()
    assert not found[1].isfinite().all()


@CACHES
def test_in_place_scores_beyond_the_range_of_exp(dtype: torch.dtype, head_dim: int) -> None:
    """Score differences are so large that float32 `exp` underflows: a weight falls to 0."""
    batch, num_blocks = make_batch([(1, 50)], 16, 0)
    layer = (torch.randn(2, num_blocks, 1, 16, head_dim) * 30).to(dtype)
    query = torch.randn(1, 1, head_dim) * 30
    exact = paged_attention_reference(query.double(), layer.double(), *batch)
    found = attend_in_place(query, layer, batch)
    torch.testing.assert_close(found, exact.float(), rtol=1e-4, atol=1e-4)
