"""Paged attention on CPUs over KV caches in float32, bfloat16, FP8 and INT8."""

from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.attention import cpu_plan
from penstock.kernels.attention.cpu_plan import CpuPagedPlan
from penstock.kernels.attention.op import paged_attention_reference
from penstock.kernels.attention.score_mod import ScoreMod
from penstock.kernels.kv_cache.format import (
    FORMATS,
    KvCacheFormat,
    codes,
    dequantize,
    scales,
    to_cache,
)
from tests.support.batches import Batch, make_batch, poison
from tests.support.threads import threads

NAMES = ["float32", "bfloat16", "fp8", "int8"]


def cache_of(features: Tensor, form: KvCacheFormat, batch: Batch) -> Tensor:
    """Return a layer [2, N, H, S, W] of `features` [2, N, H, S, D]; unused slots hold NaN."""
    poison(features, batch)
    return to_cache(features, form)


def attend(query: Tensor, layer: Tensor, batch: Batch, scores: ScoreMod, window: int) -> Tensor:
    starts, contexts, tables = batch
    rows = np.arange(len(contexts))
    out = torch.empty_like(query)
    CpuPagedPlan.of(rows, starts, contexts, tables, window).attend_(out, query, layer, scores)
    return out


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("heads", "block_size", "window"),
    [
        *(((2, 3, 24), 16, 0), ((1, 4, 64), 8, 9), ((2, 1, 10), 4, 33), ((1, 40, 16), 16, 0)),
        # Sizes that loops with AMX support.
        *(((2, 3, 64), 16, 0), ((1, 2, 128), 32, 33), ((1, 40, 64), 48, 9), ((2, 5, 192), 16, 40)),
    ],
)
def test_attention_equals_float64_attention_over_the_dequantized_cache(
    heads: tuple[int, int, int], block_size: int, window: int, name: str
) -> None:
    num_heads, group, head_dim = heads
    batch, num_blocks = make_batch([(1, 1), (9, 90), (33, 33), (1, 50)], block_size, seed=3)
    features = torch.randn(2, num_blocks, num_heads, block_size, head_dim)
    features *= torch.rand(2, num_blocks, num_heads, block_size, 1) * 4
    layer = cache_of(features, FORMATS[name], batch)
    query = torch.randn(int(batch[0][-1]), num_heads * group, head_dim)
    sinks = torch.randn(num_heads * group)
    exact = paged_attention_reference(
        query.double(), dequantize(layer, torch.float64), *batch, window,
        ScoreMod(cap=5.0, sinks=sinks.double()),
    )  # fmt: skip
    for count in (1, 2):
        with threads(count):
            found = attend(query, layer, batch, ScoreMod(cap=5.0, sinks=sinks), window)
        torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)


def check_bits_do_not_depend_on_chunking(
    lengths: list[tuple[int, int]], heads: tuple[int, int], block_size: int, window: int
) -> None:
    """Compare the bits of whole sequences with those of single tokens.

    Blocks before a token's window are not in its block table, because they may have been freed.
    """
    group, head_dim = heads
    batch, num_blocks = make_batch(lengths, block_size, seed=2)
    starts, _, tables = batch
    layer = cache_of(torch.randn(2, num_blocks, 2, block_size, head_dim), FORMATS["int8"], batch)
    query, sinks = torch.randn(int(starts[-1]), 2 * group, head_dim), torch.randn(2 * group)
    scores = ScoreMod(cap=5.0, sinks=sinks)
    whole = attend(query, layer, batch, scores, window)
    for b, (length, context) in enumerate(lengths):
        for token in range(length):
            row, context_len = int(starts[b]) + token, context - length + token + 1
            table = tables[b : b + 1].copy()
            if window:
                table[0, : max(context_len - window, 0) // block_size] = 10**6
            one = np.array([0, 1], np.int32), np.array([context_len], np.int32), table
            single = attend(query[row : row + 1], layer, one, scores, window)[0]
            assert torch.equal(single, whole[row])


@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize(
    ("heads", "block_size"), [((3, 64), 16), ((7, 64), 48), ((1, 128), 32), ((4, 40), 16)]
)
def test_bits_over_an_int8_cache_do_not_depend_on_chunking(
    heads: tuple[int, int], block_size: int, window: int
) -> None:
    lengths = [(1, 1), (9, 90), (33, 33), (1, 16), (20, 300)]
    check_bits_do_not_depend_on_chunking(lengths, heads, block_size, window)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("max_scores", [1 << 20, 1])
def test_chunks_of_long_contexts(
    name: str, max_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and values are multiplied in chunks of at most 512 positions of the context."""
    monkeypatch.setattr(cpu_plan, "MAX_SCORES", max_scores)
    batch, num_blocks = make_batch([(40, 1100), (1, 700), (70, 600)], 16, seed=4)
    layer = cache_of(torch.randn(2, num_blocks, 2, 16, 64), FORMATS[name], batch)
    query, sinks = torch.randn(int(batch[0][-1]), 6, 64), torch.randn(6)
    exact = paged_attention_reference(
        query.double(), dequantize(layer, torch.float64), *batch, 0,
        ScoreMod(cap=5.0, sinks=sinks.double()),
    )  # fmt: skip
    found = attend(query, layer, batch, ScoreMod(cap=5.0, sinks=sinks), 0)
    torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("num_tokens", "context", "window", "group", "num_threads", "tile_tokens"),
    [
        (512, 512, 0, 3, 2, 32),
        (512, 16_384, 0, 3, 2, 21),  # limited to 2^20 scores per tile
        (512, 131_072, 0, 3, 2, 5),  # not fewer than 16 rows
        (512, 131_072, 1_000, 3, 2, 32),
        (20, 16_384, 0, 1, 2, 20),
        (20, 16_384, 0, 1, 10, 4),  # one tile for each thread
        (512, 512, 0, 200, 2, 1),
    ],
)
def test_size_of_tiles_with_amx(
    num_tokens: int, context: int, window: int, group: int, num_threads: int, tile_tokens: int
) -> None:
    layer = torch.empty(2, 1, 2, 16, 64, dtype=torch.int8)
    contexts = np.array([context], np.int32)
    starts, tables = np.array([0, num_tokens], np.int32), np.zeros((1, 1), np.int32)
    plan = CpuPagedPlan.of(np.arange(1), starts, contexts, tables, window)
    with (
        mock.patch.object(cpu_plan, "uses_amx", return_value=True),
        mock.patch.object(torch, "get_num_threads", return_value=num_threads),
    ):
        assert plan._tile_tokens(group, 2, layer) == tile_tokens


def test_bits_at_the_position_where_sums_continue_as_float32() -> None:
    """`int8_values` adds the sums of 65,536 positions as float32."""
    check_bits_do_not_depend_on_chunking([(40, 65_570)], (1, 64), 16, 100)


def test_error_of_small_weights_beside_a_large_one() -> None:
    """One position has the weight 1 and the value 0; the others have the weight 1e-6 and value 1.

    Each weight is rounded to a multiple of 2^-23 of the largest one. The error of an output is
    therefore at most 2^-24 for each position. To this, 2^-20 of each small weight is added for the
    rounding of float32.
    """
    count = 50_000
    batch, num_blocks = make_batch([(1, count)], 16, seed=0)
    features = torch.zeros(2, num_blocks, 1, 16, 64)
    table = batch[2][0]
    features[0, table[0], 0, 0] = -float(np.log(1e-6)) / 64
    features[1] = 1.0
    features[1, table[0], 0, 0] = 0.0
    layer = cache_of(features, FORMATS["int8"], batch)
    query = torch.full((1, 1, 64), 1.0)
    scores = ScoreMod(scale=1.0)
    exact = paged_attention_reference(
        query.double(), dequantize(layer, torch.float64), *batch, 0, scores
    )
    found = attend(query, layer, batch, scores, 0)
    bound = count * (2.0**-24 + 2.0**-20 * 1e-6)
    assert (found - exact).abs().max() < bound


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("origin", ["query", "key", "value"])
@pytest.mark.parametrize(("group", "head_dim"), [(3, 64), (8, 64), (2, 24)])
def test_nan_and_inf_reach_only_the_output_of_their_sequence(
    group: int, head_dim: int, origin: str, value: float
) -> None:
    batch, num_blocks = make_batch([(1, 40), (1, 40)], 16, 0)
    features, query = torch.randn(2, num_blocks, 1, 16, head_dim), torch.rand(2, group, head_dim)
    if origin == "query":
        query[1, 0, 3] = value
    else:
        features[int(origin == "value"), batch[2][1, 1], 0, 3, 5] = value
    found = attend(query, cache_of(features, FORMATS["int8"], batch), batch, ScoreMod(), 0)
    assert found[0].isfinite().all()
    rows = found[1, :1] if origin == "query" else found[1]
    assert not rows.isfinite().any(dim=-1).any()
    if origin == "query":
        assert found[1, 1:].isfinite().all()


def test_sums_over_many_positions_with_the_largest_codes_do_not_overflow() -> None:
    """All weights are equal and all codes are 127: an int32 sum of all products would overflow."""
    batch, num_blocks = make_batch([(2, 140_000)], 16, seed=0)
    layer = cache_of(torch.ones(2, num_blocks, 1, 16, 64), FORMATS["int8"], batch)
    found = attend(torch.zeros(2, 1, 64), layer, batch, ScoreMod(), 0)
    expected = dequantize(layer)[1, batch[2][0, 0], 0, 0].expand(2, 1, 64)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("group", [1, 16])
@pytest.mark.parametrize("name", NAMES)
def test_rounding_error_of_sums_over_long_contexts(name: str, group: int) -> None:
    """Sums over positions have two levels, so their errors do not grow with the context.

    All weights and all values are equal: the errors of most additions then have the same sign. A
    sum over n positions adds at most SUM_POSITIONS + block size terms in a chunk, and one term per
    chunk. Each addition rounds by at most 2^-24 of the sum. An output is the quotient of two such
    sums. The loops for AMX do not support heads of 24 features.
    """
    # Machines with a GPU lack numba, but import this file.
    from penstock.kernels.attention.cpu_inner import SUM_POSITIONS

    context, block_size = 140_000, 16
    batch, num_blocks = make_batch([(2, context)], block_size, seed=0)
    layer = cache_of(torch.full((2, num_blocks, 1, block_size, 24), 1.3), FORMATS[name], batch)
    bound = 2 * (SUM_POSITIONS + block_size + context / SUM_POSITIONS + 1) * 2**-24
    expected = dequantize(layer, torch.float64)[1, batch[2][0, 0], 0, 0].expand(2, group, 24)
    # Without a sink, each weight is exactly 1, so only the sums of the values are rounded. With the
    # sink, the weights are exp(-0.3), so the sum of the weights is rounded too.
    for scores, has_sink in ((ScoreMod(), 0), (ScoreMod(sinks=torch.full((group,), 0.3)), 1)):
        found = attend(torch.zeros(2, group, 24), layer, batch, scores, 0)
        shares = [n / (n + has_sink * np.exp(0.3)) for n in (context - 1, context)]
        exact = expected * torch.tensor(shares)[:, None, None]
        torch.testing.assert_close(found.double(), exact, rtol=bound, atol=0)


@pytest.mark.parametrize("window", [0, 1500])
@pytest.mark.parametrize(("group", "block_size"), [(1, 16), (3, 48)])
def test_bits_of_long_contexts_do_not_depend_on_chunking(
    group: int, block_size: int, window: int
) -> None:
    """Rows of one tile see different chunks of `SUM_POSITIONS` positions."""
    lengths = [(40, 1030), (20, 3000), (60, 2100)]
    check_bits_do_not_depend_on_chunking(lengths, (group, 24), block_size, window)


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-30, 1e30])
def test_queries_of_any_size(size: float) -> None:
    batch, num_blocks = make_batch([(1, 40)], 16, seed=0)
    layer = cache_of(torch.randn(2, num_blocks, 1, 16, 64), FORMATS["int8"], batch)
    query = torch.randn(1, 4, 64) * size
    exact = paged_attention_reference(query.double(), dequantize(layer, torch.float64), *batch)
    found = attend(query, layer, batch, ScoreMod(), 0)
    torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_bits_are_those_of_a_float32_cache_of_the_dequantized_features(name: str) -> None:
    """A feature is exactly code x scale, so attention reads the same values as from float32."""
    batch, num_blocks = make_batch([(1, 40), (20, 61), (8, 8)], 16, seed=1)
    layer = cache_of(torch.randn(2, num_blocks, 2, 16, 40), FORMATS[name], batch)
    query = torch.randn(int(batch[0][-1]), 6, 40)
    found = attend(query, layer, batch, ScoreMod(), 0)
    assert torch.equal(found, attend(query, dequantize(layer), batch, ScoreMod(), 0))


def test_all_fp8_codes_and_float16_scales_are_converted_exactly() -> None:
    """Each context has one position, so its softmax weight is 1 and the output is its value."""
    form = FORMATS["fp8"]
    numbers = torch.arange(256)
    numbers = numbers[numbers % 128 != 127].to(torch.uint8)  # leave out the two codes that are NaN
    numbers = torch.cat((numbers, numbers[:2])).view(8, 32)
    finite = torch.arange(0x7C00, dtype=torch.int16).view(torch.float16)
    scale = torch.cat((finite[:8], finite[1020:1028], finite[-8:], torch.rand(40).half()))
    layer = torch.zeros(2, 64 * 8, 1, 1, form.slot_elements(32)).to(form.dtype)
    codes(layer)[1, :, 0, 0].view(torch.uint8).copy_(numbers.repeat(64, 1))
    scales(layer)[1, :, 0, 0] = scale.repeat_interleave(8)
    batch = (
        np.arange(513, dtype=np.int32),
        np.ones(512, np.int32),
        np.arange(512, dtype=np.int32)[:, None],
    )
    found = attend(torch.randn(512, 1, 32), layer, batch, ScoreMod(), 0)
    assert torch.equal(found[:, 0], dequantize(layer)[1, :, 0, 0])
