"""Writing keys and values, and moving rectangles of blocks."""

import torch

from penstock.kernels.blocks import gather_blocks, scatter_blocks
from penstock.kernels.cache import write_kv, write_kv_reference, write_rows


def test_write_goes_to_the_slots_and_nowhere_else() -> None:
    layer = torch.randn(2, 7, 3, 4, 5)
    expected = layer.clone()
    slots = torch.tensor([0, 27, 13, 14, 3])
    fused = torch.randn(5, 4 + 6, 5)  # query heads before: the tail is a strided view
    write_kv(layer, write_rows(slots, layer.shape), fused[:, 4:])
    write_kv_reference(expected, slots, fused[:, 4:])
    assert torch.equal(layer, expected)


def test_compressed_rows_have_one_side() -> None:
    layer = torch.randn(1, 7, 1, 4, 5)
    expected = layer.clone()
    slots, rows = torch.tensor([9, 0, 27]), torch.randn(3, 1, 5)
    write_kv(layer, write_rows(slots, layer.shape), rows)
    write_kv_reference(expected, slots, rows)
    assert torch.equal(layer, expected)
    assert torch.equal(layer[0, 2, 0, 1], rows[0, 0])


def test_a_narrow_cache_holds_the_nearest() -> None:
    layer = torch.zeros(2, 7, 3, 4, 5).bfloat16()
    expected = layer.clone()
    slots, new = torch.tensor([9, 0, 27]), torch.randn(3, 6, 5)
    new[0, 0], new[1, 2, 3] = torch.nan, torch.inf
    write_kv(layer, write_rows(slots, layer.shape), new)
    write_kv_reference(expected, slots, new)
    assert torch.equal(layer.view(torch.int16), expected.view(torch.int16))
    assert layer[0, 2, 0, 1].isnan().all()


def test_an_fp8_cache_holds_what_its_scales_say() -> None:
    layer = torch.zeros(2, 7, 3, 4, 8).to(torch.float8_e4m3fn)
    expected = layer.clone()
    scales = torch.tensor([[0.25, 1.0, 2.0], [4.0, 0.5, 1.0]])
    slots, new = torch.tensor([9, 0, 27]), torch.randn(3, 6, 8) * 300
    write_kv(layer, write_rows(slots, layer.shape), new, scales)
    write_kv_reference(expected, slots, new, scales)
    assert torch.equal(layer.view(torch.uint8), expected.view(torch.uint8))
    assert (layer.float().abs() == 448).any()


def test_a_rectangle_of_blocks_moves_whole() -> None:
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
