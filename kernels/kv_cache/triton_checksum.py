"""Triton kernel that sums the words of a checksum, and its launcher (see `checksum`)."""

import torch
from torch import Tensor

from penstock.kernels.triton_common.launch import jit, launch, tl

TILE = 2048
"""Words per program."""


@jit
def _sum_words_kernel(
    words,  # [n] int64
    weights,  # [n + 1] int64 odd random numbers
    total,  # [1] int64, initially zero
    num_words,  # n, number of words
    TILE: tl.constexpr,  # words per program
):
    """Add the checksum terms of TILE words to `total`. Grid: [n / TILE]."""
    offsets = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    mask = offsets < num_words
    values = tl.load(words + offsets, mask=mask, other=0)
    products = values * tl.load(weights + offsets, mask=mask, other=0)
    products += (values >> 32) * tl.load(weights + offsets + 1, mask=mask, other=0)
    tl.atomic_add(total, tl.sum(products, axis=0), sem="relaxed")


def sum_words_triton(words: Tensor, weights: Tensor) -> Tensor:
    """Return the sum over `words` [n] int64, with `weights` [m] int64 and m > n, as a tensor []."""
    total = torch.zeros(1, dtype=torch.int64, device=words.device)
    grid = (-(-len(words) // TILE),)
    launch(_sum_words_kernel, grid, words, weights, total, len(words), TILE=TILE, num_warps=8)
    return total[0]
