"""A 64-bit checksum of a tensor's bytes, computed where the tensor is.

Multilinear: each 64-bit word and its high half are multiplied by fixed odd random numbers and all
is summed modulo 2^64, so that any change within one word is always seen, and any other change is
missed with a chance of about 2^-63. (The high half is counted again because the top bits of a
product modulo 2^64 forget the low bits of the factor.) It guards against faults, not forgery.

    sum of w[i] r[i] + (w[i] >> 32) r[i + 1], and of the number of bytes times a constant

The same number on every device: integers have no order of summation.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.triton_common.aot import AotCase, meta
from penstock.kernels.triton_common.launch import (
    check,
    check_contiguous,
    jit,
    launch,
    power_of_2,
    tl,
    use_triton,
)

_SEED = 0x50454E5354

TILE = 2048
"""Words a program."""


def checksum(data: Tensor) -> int:
    """The checksum, in [0, 2^64), of a contiguous tensor of any shape and dtype, on any device."""
    check_contiguous("data", data)
    raw = data.view(-1).view(torch.uint8)
    size = raw.numel()
    if size % 8:
        raw = torch.nn.functional.pad(raw, (0, -size % 8))
    words = raw.view(torch.int64)
    weights = _weights(_round_up(words.numel() + 1), words.device)
    # The length keeps trailing zeros from being invisible.
    return (int(sum_words(words, weights)) + size * _SEED) % (1 << 64)


def sum_words(words: Tensor, weights: Tensor) -> Tensor:
    """The sum alone, modulo 2^64, [] int64; words [n], weights [m] int64 with m > n."""
    if use_triton(words):
        return _sum(words, weights)
    mixed = (words >> 32).mul_(weights[1 : words.numel() + 1])
    mixed.addcmul_(words, weights[: words.numel()])
    return mixed.sum()


def checksum_reference(data: bytes) -> int:
    """What `checksum` means, word by word."""
    padded = data + bytes(-len(data) % 8)
    words = np.frombuffer(padded, np.int64).tolist()
    weights = _weights(_round_up(len(words) + 1), torch.device("cpu")).tolist()
    total: int = sum(
        word * weights[at] + (word >> 32) * weights[at + 1] for at, word in enumerate(words)
    )
    return (total + len(data) * _SEED) % (1 << 64)


def _round_up(num_words: int) -> int:
    return max(1 << 12, power_of_2(num_words))


@lru_cache(maxsize=8)
def _weights(num_words: int, device: torch.device) -> Tensor:
    """Odd random numbers [num_words] int64: a prefix of the same sequence for every length."""
    # A generator whose numbers are the same in every version.
    numbers = np.random.PCG64(_SEED).random_raw(num_words) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)


@jit
def _add_words(
    words,  # [n] int64
    weights,  # [n + 1] int64
    total,  # [1] int64, zero at first
    num_words,  # n
    TILE: tl.constexpr,  # words a program
):
    """n / TILE programs."""
    offsets = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = offsets < num_words
    values = tl.load(words + offsets, mask=mask, other=0)
    products = values * tl.load(weights + offsets, mask=mask, other=0)
    products += (values >> 32) * tl.load(weights + offsets + 1, mask=mask, other=0)
    tl.atomic_add(total, tl.sum(products, axis=0), sem="relaxed")


def _sum(words: Tensor, weights: Tensor) -> Tensor:
    check("words", words, ["n"], [torch.int64])
    check("weights", weights, ["m"], [torch.int64], like=words)
    check_contiguous("weights", weights)
    if len(weights) <= len(words):
        raise ValueError(f"weights: more than {len(words)} expected, not {len(weights)}")
    total = torch.zeros(1, dtype=torch.int64, device=words.device)
    grid = (-(-len(words) // TILE),)
    launch(_add_words, grid, words, weights, total, len(words), TILE=TILE, num_warps=8)
    return total[0]


def aot_cases() -> Iterator[AotCase]:
    words = meta(1 << 20, dtype=torch.int64)
    weights = meta(1 << 21, dtype=torch.int64)
    yield AotCase("8 MiB", lambda: sum_words(words, weights), streams=("_add_words",))
