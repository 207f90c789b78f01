"""Paged attention on CPUs over KV caches in float32, bfloat16, FP8 and INT8."""

import numpy as np
import pytest
import torch
from torch import Tensor

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
    [((2, 3, 24), 16, 0), ((1, 4, 64), 8, 9), ((2, 1, 10), 4, 33), ((1, 40, 16), 16, 0)],
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
