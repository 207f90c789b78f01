"""Writes to the KV cache, and block copies of ranges of layers and heads."""

import pytest
import torch

from penstock.kernels.kv_cache import op as cache
from penstock.kernels.kv_cache.block_copy import copy_blocks, gather_blocks, scatter_blocks
from penstock.kernels.kv_cache.format import FORMATS, dequantize, to_cache
from penstock.kernels.kv_cache.op import rope_and_cache, slot_rows, write_kv, write_kv_reference
from penstock.kernels.rope.op import rotary_table, rotate_reference
from tests.support.threads import threads


def test_write_kv_changes_only_the_given_slots() -> None:
    layer = torch.randn(2, 7, 3, 4, 5)
    expected = layer.clone()
    slots = torch.tensor([0, 27, 13, 14, 3])
    # Query heads come first, so keys and values are a strided view.
    fused = torch.randn(5, 4 + 6, 5)
    write_kv(layer, slot_rows(slots, layer.shape), fused[:, 4:])
    write_kv_reference(expected, slots, fused[:, 4:])
    assert torch.equal(layer, expected)


def test_mla_rows_are_written_without_a_value_side() -> None:
    layer = torch.randn(1, 7, 1, 4, 5)
    expected = layer.clone()
    slots, rows = torch.tensor([9, 0, 27]), torch.randn(3, 1, 5)
    write_kv(layer, slot_rows(slots, layer.shape), rows)
    write_kv_reference(expected, slots, rows)
    assert torch.equal(layer, expected)
    assert torch.equal(layer[0, 2, 0, 1], rows[0, 0])


def test_a_bfloat16_cache_rounds_to_nearest() -> None:
    layer = torch.zeros(2, 7, 3, 4, 5).bfloat16()
    expected = layer.clone()
    slots, new = torch.tensor([9, 0, 27]), torch.randn(3, 6, 5)
    new[0, 0], new[1, 2, 3] = torch.nan, torch.inf
    write_kv(layer, slot_rows(slots, layer.shape), new)
    write_kv_reference(expected, slots, new)
    assert torch.equal(layer.view(torch.int16), expected.view(torch.int16))
    assert layer[0, 2, 0, 1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [4, 10, 0])
def test_rope_and_cache_rotates_and_writes(
    rotary_dim: int, interleaved: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MIN_PARALLEL_ELEMENTS", 1)
    frequencies = 0.5 ** torch.arange(rotary_dim // 2).float()
    table = rotary_table(frequencies, 40, torch.float32, interleaved=interleaved)
    slots, positions = torch.randperm(28)[:9], torch.randperm(40)[:9]
    heads = torch.randn(9, 5 + 2 * 3, 10)
    heads[2, 6, 1], heads[3, 9, 9] = torch.nan, torch.inf
    expected_heads = heads.clone()
    rotated = expected_heads[:, :8, :rotary_dim]
    rotated.copy_(rotate_reference(rotated, positions, frequencies, interleaved))
    expected = torch.randn(2, 7, 3, 4, 10).to(dtype)
    before = expected.clone()
    write_kv_reference(expected, slots, expected_heads[:, 5:])
    for numba, count in ((True, 1), (True, 2), (False, 1)):
        monkeypatch.setattr(cache, "has_numba", lambda numba=numba: numba)
        layer, wide = before.clone(), torch.cat((heads, heads), 1)
        actual_heads = wide[:, : heads.shape[1]] if count == 2 else heads.clone()
        with threads(count):
            rows = slot_rows(slots, layer.shape)
            rope_and_cache(actual_heads, 5, table[positions], rows, layer, interleaved)
        torch.testing.assert_close(actual_heads[:, :5], expected_heads[:, :5])
        rtol = 1e-5 if dtype == torch.float32 else 8e-3
        torch.testing.assert_close(layer, expected, equal_nan=True, rtol=rtol, atol=1e-5)


def test_rows_outside_the_cache_are_refused() -> None:
    layer, heads = torch.zeros(2, 7, 3, 4, 8), torch.randn(2, 8, 8)
    rows = slot_rows(torch.tensor([3, 4]), layer.shape)
    rows[1, 2] = 2 * 7 * 3 * 4
    with pytest.raises(IndexError):
        rope_and_cache(heads, 2, torch.ones(2, 2, 8), rows, layer)
    with pytest.raises(ValueError, match="heads"):
        rope_and_cache(heads[:, :7].contiguous(), 2, torch.ones(2, 2, 8), rows, layer)


@pytest.mark.parametrize("name", ["fp8", "int8"])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e-4, 1.0, 300.0, 1e6, 1e38])
def test_all_writes_of_codes_have_the_bits_of_the_reference(name: str, magnitude: float) -> None:
    new = torch.randn(9, 4 + 6, 24) * magnitude
    new[1, 5], new[2, 6, 3], new[3, 7, 2], new[4, 8] = 0.0, torch.nan, torch.inf, 1e-45
    new[5] *= torch.rand(10, 1)
    before = torch.randint(-128, 128, (2, 7, 3, 4, 26), dtype=torch.int8)
    before = before.view(FORMATS[name].dtype)
    expected, written, fused = before.clone(), before.clone(), before.clone()
    slots = torch.randperm(28)[:9]
    rows = slot_rows(slots, before.shape)
    write_kv_reference(expected, slots, new[:, 4:])
    write_kv(written, rows, new[:, 4:])
    rope_and_cache(new, 4, torch.zeros(9, 2, 0), rows, fused)
    assert torch.equal(written.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(fused.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_copies_of_blocks_contain_the_scales(name: str) -> None:
    cache = to_cache(torch.randn(3, 2, 9, 2, 4, 6), FORMATS[name])
    expected = dequantize(cache)
    expected[:, :, [1, 7]] = expected[:, :, [8, 1]]
    copy_blocks(cache, torch.tensor([8, 1]), torch.tensor([1, 7]))
    assert torch.equal(dequantize(cache), expected)
    other = to_cache(torch.randn(3, 2, 9, 2, 4, 6), FORMATS[name])
    layers, heads = slice(1, 3), slice(1, 2)
    staged = gather_blocks(cache, torch.tensor([5, 1]), layers, heads)
    scatter_blocks(other, torch.tensor([0, 4]), layers, heads, staged)
    assert torch.equal(dequantize(other)[1:, :, [0, 4], 1:], expected[1:, :, [5, 1], 1:])


def test_gather_and_scatter_move_ranges_of_layers_and_heads() -> None:
    source = torch.randn(4, 2, 9, 6, 3, 5)
    target = torch.zeros(4, 2, 8, 6, 3, 5)
    layers, heads = slice(1, 3), slice(2, 6)
    staged = gather_blocks(source, torch.tensor([8, 0, 5]), layers, heads)
    assert staged.is_contiguous()
    assert staged.shape == (2, 2, 3, 4, 3, 5)
    scatter_blocks(target, torch.tensor([1, 7, 2], dtype=torch.int32), layers, heads, staged)
    expected = torch.zeros_like(target)
    for to, of in ((1, 8), (7, 0), (2, 5)):
        expected[1:3, :, to, 2:6] = source[1:3, :, of, 2:6]
    assert torch.equal(target, expected)
