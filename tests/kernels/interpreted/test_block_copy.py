"""The Triton kernels that move KV blocks and compute their checksums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.kv_cache.block_copy import copy_blocks, gather_blocks, scatter_blocks
from penstock.kernels.kv_cache.checksum import CHUNK, checksum, checksum_reference, sum_words
from tests.support.kernels import poisoned

pytestmark = pytest.mark.interpreted

DTYPES = [torch.float32, torch.float16, torch.float8_e4m3fn]
SHAPES = [(3, 2, 7, 4, 2, 3), (1, 1, 5, 1, 1, 1), (2, 2, 6, 3, 16, 72), (2, 1, 9, 1, 4, 5)]


def random_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), dtype=torch.uint8)


@settings(max_examples=14)
@given(st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.data())
def test_gather_and_scatter_move_ranges_of_layers_and_heads(
    shape: tuple[int, ...], dtype: torch.dtype, draw: st.DataObject
) -> None:
    layers, heads = (
        slice(*sorted((draw.draw(st.integers(0, size)), draw.draw(st.integers(0, size)))))
        for size in (shape[0], shape[3])
    )
    count = draw.draw(st.integers(0, shape[2]))
    source, target = random_bytes(shape, dtype), random_bytes(shape, dtype)
    expected = target.clone()
    sources = torch.randperm(shape[2])[:count].int()
    targets = torch.randperm(shape[2])[:count]
    staged = gather_blocks(source.view(dtype), sources, layers, heads)
    assert staged.is_contiguous()
    picked = source[layers, :, :, heads].index_select(2, sources)
    assert torch.equal(staged.view(torch.uint8), picked)
    scatter_blocks(target.view(dtype), targets, layers, heads, staged)
    expected[layers, :, :, heads].index_copy_(2, targets, staged.view(torch.uint8))
    assert torch.equal(target, expected)


def test_copy_blocks_swaps_blocks() -> None:
    kv = torch.randn(2, 2, 6, 3, 4, 8)
    expected = kv.clone()
    expected[:, :, [1, 4, 5]] = kv[:, :, [4, 1, 4]]
    copy_blocks(kv, torch.tensor([4, 1, 4]), torch.tensor([1, 4, 5]))
    assert torch.equal(kv, expected)


def test_unknown_blocks_read_as_zero_and_are_not_written() -> None:
    memory = poisoned(3, 2, 4, 2, 4, 8)
    kv, whole = memory[1:2].view(1, 2, 4, 2, 4, 8), (slice(0, 1), slice(0, 2))
    untouched = memory.clone()
    unknown = torch.tensor([-1, 4, 1 << 40])
    assert not gather_blocks(kv, unknown, *whole).any()
    scatter_blocks(kv, unknown, *whole, torch.randn(1, 2, 3, 2, 4, 8))
    assert torch.equal(memory.view(torch.int32), untouched.view(torch.int32))


def test_invalid_arguments_are_refused() -> None:
    kv, blocks = torch.zeros(2, 2, 5, 4, 2, 8), torch.arange(3)
    layers, heads = slice(0, 2), slice(1, 3)
    with pytest.raises(ValueError, match=r"heads is .*start <= stop <= 4"):
        gather_blocks(kv, blocks, layers, slice(2, 5))
    with pytest.raises(ValueError, match="blocks has dtype float32: expected int32 or int64"):
        gather_blocks(kv, blocks.float(), layers, heads)
    with pytest.raises(ValueError, match=r"kv has strides .*: expected a contiguous tensor"):
        gather_blocks(kv.transpose(3, 4), blocks, layers, slice(0, 2))
    with pytest.raises(ValueError, match=r"staged has shape .*: expected \[2, 2, 3, 2, 2, 8\]"):
        scatter_blocks(kv, blocks, layers, heads, torch.zeros(2, 2, 2, 2, 2, 8))


@settings(max_examples=10)
@given(st.sampled_from([0, 1, 7, 8, 9, 4000, 32768, 32776, 70000]))
def test_checksum_matches_the_cpu_reference(num_bytes: int) -> None:
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    assert checksum(data) == checksum_reference(data.cpu().numpy().tobytes())


def test_too_few_checksum_weights_are_refused() -> None:
    words, weights, chunk_weights = (
        torch.zeros(size, dtype=torch.int64) for size in (CHUNK + 1, CHUNK + 1, 2)
    )
    with pytest.raises(ValueError, match="chunk_weights has 2 weights: expected at least 3"):
        sum_words(words, weights, chunk_weights)
