"""Compares ALiBi slopes and biases with those of transformers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from penstock.workers.layers.cached_alibi import CachedAlibiBias
from penstock.workers.models.alibi import alibi_slopes

CPU = torch.device("cpu")


@given(st.integers(1, 200))
def test_slopes_match_bloom(num_heads: int) -> None:
    expected = modeling_bloom._get_alibi_slopes(num_heads, CPU)
    torch.testing.assert_close(torch.tensor(alibi_slopes(num_heads)), expected, rtol=1e-5, atol=0)


@given(st.integers(1, 200), st.integers(1, 20))
def test_slopes_match_mpt(num_heads: int, bias_max: int) -> None:
    biases = modeling_mpt.build_mpt_alibi_tensor(num_heads, 2, bias_max)
    expected = -biases[:, 0, 0]
    found = torch.tensor(alibi_slopes(num_heads, bias_max))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("num_heads", [1, 4, 6, 12, 32, 64, 71])
def test_rounded_biases_match_falcon(num_heads: int) -> None:
    positions = torch.arange(2300)
    ones = torch.ones(1, len(positions), dtype=torch.int64)
    expected = modeling_falcon.build_alibi_tensor(ones, num_heads, torch.float32)[:, 0]
    slopes = torch.tensor(alibi_slopes(num_heads), dtype=torch.bfloat16)
    heads = torch.randn(len(positions), 3 * num_heads, 5)
    extended = CachedAlibiBias(slopes, 3).append(heads, positions)
    assert torch.equal(extended[:, :, :5], heads)
    query, keys, values = extended[:, :, 5:].chunk(3, dim=1)
    assert torch.equal(keys[:, :, 0].T, expected)
    assert (query[:, :, 0] == 1).all()
    for rest in (values, query[:, :, 1:], keys[:, :, 1:]):
        assert not rest.any()
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(keys.to(dtype).float(), keys), "a 16-bit cache must be exact"
