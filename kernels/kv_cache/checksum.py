"""A 64-bit checksum of a tensor's bytes, computed on the tensor's device.

    sum over i of w[i] r[i] + (w[i] >> 32) r[i + 1], plus the number of bytes times a constant

The checksum is a multilinear hash: each 64-bit word w[i] and its high half are multiplied by fixed
odd random numbers r, and the products are summed modulo 2^64. A change within one word is always
detected. The probability that any other change is missed is about 2^-63. (The high half is also
multiplied separately, because the top bits of a word only affect the top bits of the word's product
modulo 2^64.) The checksum protects against faults, not against forgery.

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

_SEED = 0x50454E5354


def checksum(data: Tensor) -> int:
    """Return the checksum, in [0, 2^64), of a contiguous tensor of any shape, dtype and device."""
    return int(checksum_on_device(data)) % (1 << 64)


def checksum_on_device(data: Tensor) -> Tensor:
    """Return the checksum of `data` as an int64 tensor of shape [], without waiting for the device.

    The value is the checksum modulo 2^64 as a signed number. `data` is contiguous.
    """
    check_contiguous("data", data)
    raw = data.view(-1).view(torch.uint8)
    size = raw.numel()
    if size % 8:
        raw = torch.nn.functional.pad(raw, (0, -size % 8))
    words = raw.view(torch.int64)
    weights = _weights(_round_up(words.numel() + 1), words.device)
    # Without the length, trailing zeros would not change the sum.
    length = (size * _SEED + (1 << 63)) % (1 << 64) - (1 << 63)
    return sum_words(words, weights) + length


def sum_words(words: Tensor, weights: Tensor) -> Tensor:
    """Return the checksum without the term for the length, as an int64 tensor of shape [].

    `words` is [n] int64, and `weights` is [m] int64 with m > n.
    """
    if use_triton(words):
        check("words", words, ["n"], [torch.int64])
        check("weights", weights, ["m"], [torch.int64], like=words)
        check_contiguous("weights", weights)
        if len(weights) <= len(words):
            raise ValueError(f"weights: more than {len(words)} expected, not {len(weights)}")
        return sum_words_triton(words, weights)
    if words.device.type == "cpu" and has_numba():
        return torch.tensor(_cpu_kernel()(words.numpy(), weights.numpy()))
    return sum_words_reference(words, weights)


def sum_words_reference(words: Tensor, weights: Tensor) -> Tensor:
    """Reference for `sum_words` in plain torch."""
    mixed = (words >> 32).mul_(weights[1 : words.numel() + 1])
    mixed.addcmul_(words, weights[: words.numel()])
    return mixed.sum()


def checksum_reference(data: bytes) -> int:
    """Reference for `checksum`: processes one word at a time."""
    padded = data + bytes(-len(data) % 8)
    words = np.frombuffer(padded, np.int64).tolist()
    weights = _weights(_round_up(len(words) + 1), torch.device("cpu")).tolist()
    total: int = sum(
        word * weights[at] + (word >> 32) * weights[at + 1] for at, word in enumerate(words)
    )
    return (total + len(data) * _SEED) % (1 << 64)


def load_cpu_kernels() -> None:
    """Load or compile the numba loop."""
    _cpu_kernel()


@cache
def _cpu_kernel() -> Any:
    configure_numba()
    from penstock.kernels.kv_cache.cpu_checksum import sum_words as compiled

    return compiled


def _round_up(num_words: int) -> int:
    return max(1 << 12, power_of_2(num_words))


@lru_cache(maxsize=8)
def _weights(num_words: int, device: torch.device) -> Tensor:
    """Return [num_words] odd random int64: always the first numbers of the same fixed sequence."""
    # PCG64 gives the same raw numbers in every version of numpy.
    numbers = np.random.PCG64(_SEED).random_raw(num_words) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)
