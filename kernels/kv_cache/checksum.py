"""A 64-bit checksum of a tensor's bytes, computed on the tensor's device.

    h(w, r) = sum over i of w[i] r[i] + (w[i] >> 32) r[i + 1]

The checksum is built from this multilinear hash h. Each 64-bit word w[i] and the upper half of each
word are multiplied by fixed odd random numbers r, and the products are summed modulo 2^64. (The
upper half has a product of its own, because the top bits of a word only affect the top bits of the
word's product modulo 2^64.)

The data is hashed in two levels. First, each chunk of CHUNK words is hashed. All chunks use the
same random numbers, which stay in the cache of a CPU core. Then the hashes of the chunks are hashed
with other random numbers. Finally, the number of bytes times a constant is added. The probability
that a change is not detected is about 2^-63 for most changes. It is largest, about 2^-32, if two
words of a chunk change only in bit 31, or only in bit 63. The checksum detects faults, but not
forgery.

All devices compute the same checksum, because an integer sum does not depend on the order of its
terms.
"""

from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.checks import check, check_contiguous
from penstock.kernels.cpu_common.numba_runtime import configure_numba, has_numba
from penstock.kernels.kv_cache.triton_checksum import sum_words_triton
from penstock.kernels.triton_common.launch import power_of_2, use_triton

CHUNK = 2048
"""Number of words of a chunk: 16 KiB of data. The random numbers that all chunks use also have
16 KiB."""

_SEED = 0x50454E5354


def checksum(data: Tensor) -> int:
    """Return the checksum, in [0, 2^64), of a contiguous tensor of any shape, dtype and device."""
    return int(checksum_on_device(data)) % (1 << 64)


def checksum_on_device(data: Tensor) -> Tensor:
    """Return the checksum of `data` as an int64 tensor of shape [], without waiting for the device.

    The int64 has the same 64 bits as the checksum, so it may be negative. `data` must be
    contiguous.
    """
    check_contiguous("data", data)
    raw = data.view(-1).view(torch.uint8)
    size = raw.numel()
    if size % 8:
        raw = torch.nn.functional.pad(raw, (0, -size % 8))
    words = raw.view(torch.int64)
    weights = _weights(0, CHUNK + 1, words.device)
    chunk_weights = _weights(1, _round_up(num_chunks(len(words)) + 1), words.device)
    # The length is added because trailing zeros do not change the sum.
    length = (size * _SEED + (1 << 63)) % (1 << 64) - (1 << 63)
    return sum_words(words, weights, chunk_weights) + length


def num_chunks(num_words: int) -> int:
    return -(-num_words // CHUNK)


def sum_words(words: Tensor, weights: Tensor, chunk_weights: Tensor) -> Tensor:
    """Return the checksum without the term for the length, as an int64 tensor of shape [].

    Args:
        words: [n] int64.
        weights: [CHUNK + 1] int64, the random numbers for the words of each chunk.
        chunk_weights: [m] int64, the random numbers for the chunks' hashes; m > `num_chunks(n)`.
    """
    if use_triton(words):
        check("words", words, ["n"], [torch.int64])
        check("weights", weights, [CHUNK + 1], [torch.int64], like=words)
        check("chunk_weights", chunk_weights, ["m"], [torch.int64], like=words)
        check_contiguous("words", words)
        check_contiguous("weights", weights)
        check_contiguous("chunk_weights", chunk_weights)
    least = num_chunks(len(words)) + 1
    if len(chunk_weights) < least:
        raise ValueError(
            f"chunk_weights has {len(chunk_weights)} weights: expected at least {least}"
        )
    if use_triton(words):
        return sum_words_triton(words, weights, chunk_weights)
    if words.device.type == "cpu" and has_numba():
        arrays = words.numpy(), weights.numpy(), chunk_weights.numpy()
        return torch.tensor(_cpu_kernel()(*arrays))
    return sum_words_reference(words, weights, chunk_weights)


def sum_words_reference(words: Tensor, weights: Tensor, chunk_weights: Tensor) -> Tensor:
    """Reference for `sum_words` in plain torch."""
    chunks = torch.nn.functional.pad(words, (0, -len(words) % CHUNK)).view(-1, CHUNK)
    return _hash_reference(_hash_reference(chunks, weights), chunk_weights)


def _hash_reference(words: Tensor, weights: Tensor) -> Tensor:
    """Return the hashes [...] of the words [..., n]. `weights` has at least n + 1 elements."""
    num_words = words.shape[-1]
    return (words * weights[:num_words] + (words >> 32) * weights[1 : num_words + 1]).sum(-1)


def checksum_reference(data: bytes) -> int:
    """Reference for `checksum`: processes one word at a time."""
    padded = data + bytes(-len(data) % 8)
    words = np.frombuffer(padded, np.int64).tolist()
    size = _round_up(num_chunks(len(words)) + 1)
    weights, chunk_weights = (
        _weights(level, count, torch.device("cpu")).tolist()
        for level, count in enumerate((CHUNK + 1, size))
    )

    def hash_of(words: list[int], weights: list[int]) -> int:
        terms = (w * weights[i] + (w >> 32) * weights[i + 1] for i, w in enumerate(words))
        total = sum(terms) % (1 << 64)
        return total - (total >> 63 << 64)  # convert to a signed 64-bit number

    chunks = [hash_of(words[at : at + CHUNK], weights) for at in range(0, len(words), CHUNK)]
    return (hash_of(chunks, chunk_weights) + len(data) * _SEED) % (1 << 64)


def load_cpu_kernels() -> None:
    """Load or compile the numba loop."""
    _cpu_kernel()


@cache
def _cpu_kernel() -> Any:
    configure_numba()
    from penstock.kernels.kv_cache.cpu_checksum import sum_words as compiled

    return compiled


def _round_up(count: int) -> int:
    return max(1 << 12, power_of_2(count))


@lru_cache(maxsize=8)
def _weights(level: int, count: int, device: torch.device) -> Tensor:
    """Return the first `count` numbers of the fixed sequence of odd random int64 of a level.

    Level 0 is for the words of a chunk, level 1 for the hashes of the chunks.
    """
    # PCG64 returns the same raw numbers in every version of numpy.
    numbers = np.random.PCG64(_SEED + level).random_raw(count) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)
