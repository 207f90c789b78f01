"""A 64-bit checksum of a tensor's bytes, computed where the tensor is.

Multilinear: each 64-bit word and its high half are multiplied by fixed odd random numbers and all
is summed modulo 2^64, so that any change within one word is always seen, and any other change is
missed with a chance of about 2^-63. (The high half is counted again because the top bits of a
product modulo 2^64 forget the low bits of the factor.) It guards against faults, not forgery.
"""

from functools import lru_cache

import numpy as np
import torch

_SEED = 0x50454E5354


def checksum(data: torch.Tensor) -> int:
    """The checksum, in [0, 2^64), of a contiguous tensor of any shape and dtype, on any device."""
    raw = data.view(-1).view(torch.uint8)
    size = raw.numel()
    if size % 8:
        raw = torch.nn.functional.pad(raw, (0, -size % 8))
    words = raw.view(torch.int64)
    weights = _weights(_round_up(words.numel() + 1), words.device)
    mixed = (words >> 32).mul_(weights[1 : words.numel() + 1])
    mixed.addcmul_(words, weights[: words.numel()])
    # The length keeps trailing zeros from being invisible.
    return (int(mixed.sum()) + size * _SEED) % (1 << 64)


def _round_up(num_words: int) -> int:
    return max(1 << 12, 1 << (num_words - 1).bit_length())


@lru_cache(maxsize=8)
def _weights(num_words: int, device: torch.device) -> torch.Tensor:
    """Odd random numbers [num_words] int64: a prefix of the same sequence for every length."""
    # A generator whose numbers are the same in every version.
    numbers = np.random.PCG64(_SEED).random_raw(num_words) | np.uint64(1)
    return torch.from_numpy(numbers.view(np.int64)).to(device)
