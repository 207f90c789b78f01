"""The checksum changes when bytes are corrupted, reordered or missing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels.kv_cache.checksum import (
    CHUNK,
    checksum,
    checksum_on_device,
    checksum_reference,
    num_chunks,
    sum_words,
    sum_words_reference,
)


def data(num_bytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


@given(st.integers(1, 3000), st.data())
def test_up_to_three_flipped_bits_change_the_checksum(num_bytes: int, draw: st.DataObject) -> None:
    bits = st.tuples(st.integers(0, num_bytes - 1), st.integers(0, 7))
    flips = draw.draw(st.sets(bits, min_size=1, max_size=3))
    good = data(num_bytes)
    bad = good.clone()
    for index, bit in flips:
        bad[index] ^= 1 << bit
    assert checksum(good) != checksum(bad)


def test_top_bits_flipped_in_two_words_do_not_cancel() -> None:
    checksums = {checksum(data(4096))}
    for first in range(0, 64):
        bad = data(4096)
        bad[8 * first + 7] ^= 128
        bad[8 * first + 15] ^= 128
        checksums.add(checksum(bad))
    assert len(checksums) == 65


@pytest.mark.parametrize("size", [8, 8 * CHUNK])
def test_reordered_words_and_chunks_change_the_checksum(size: int) -> None:
    good = data(4 * size)
    bad = good.view(-1, size).flip(0).reshape(-1).contiguous()
    assert checksum(good) != checksum(bad)


def test_equal_changes_of_two_chunks_do_not_cancel() -> None:
    checksums = {checksum(data(64 * 8 * CHUNK))}
    for chunk in range(1, 64):
        bad = data(64 * 8 * CHUNK)
        bad[[7, chunk * 8 * CHUNK + 7]] ^= 128
        checksums.add(checksum(bad))
    assert len(checksums) == 64


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 100_000])
def test_zeros_of_different_lengths_have_different_checksums(num_bytes: int) -> None:
    zeros = torch.zeros(num_bytes + 1, dtype=torch.uint8)
    assert checksum(zeros) != checksum(zeros[:num_bytes])
    assert 0 <= checksum(zeros) < 1 << 64


def test_checksum_does_not_depend_on_shape_or_dtype() -> None:
    flat = data(4 * 1024)
    assert checksum(flat.view(torch.float32).view(2, -1)) == checksum(flat)


def test_checksum_is_the_same_in_every_process_and_version() -> None:
    assert checksum(torch.arange(4096, dtype=torch.int32)) == 15592791479154603409


@pytest.mark.parametrize("num_words", [0, 1, 512, CHUNK, CHUNK + 1, 5 * CHUNK - 3])
def test_compiled_sum_equals_the_reference(num_words: int) -> None:
    arrays = [
        data(8 * size, seed).view(torch.int64)
        for seed, size in enumerate((num_words, CHUNK + 1, num_chunks(num_words) + 1))
    ]
    assert sum_words(*arrays) == sum_words_reference(*arrays)


@pytest.mark.parametrize("num_bytes", [1, 4096, 8 * CHUNK, 100_001])
def test_checksum_on_the_device_is_the_signed_checksum(num_bytes: int) -> None:
    signed = int(checksum_on_device(data(num_bytes)))
    assert -(1 << 63) <= signed < 1 << 63
    assert (
        signed % (1 << 64)
        == checksum(data(num_bytes))
        == checksum_reference(data(num_bytes).numpy().tobytes())
    )
