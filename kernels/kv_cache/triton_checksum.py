"""Triton kernel that hashes the 64-bit words of the data for `checksum`, and its launcher."""

import torch
from torch import Tensor

from penstock.kernels.triton_common.launch import jit, launch, tl


@jit
def _sum_words_kernel(
    words,  # [n] int64
    weights,  # [CHUNK + 1] int64 odd random numbers, for the words of a chunk
    chunk_weights,  # [chunks + 1] int64 odd random numbers, for the chunks' hashes
    total,  # [1] int64 sum that the kernel adds to; initially zero
    num_words,  # n, number of words
    CHUNK: tl.constexpr,  # number of words per chunk
):
    """Hash one chunk, multiply the hash by the chunk's weights, and add the result to `total`.

    The hash is multiplied by one weight, and the upper half of the hash by another weight. The grid
    is [chunks].
    """
    chunk = tl.program_id(0)
    within = tl.arange(0, CHUNK)
    offsets = chunk.to(tl.int64) * CHUNK + within
    values = tl.load(words + offsets, mask=offsets < num_words, other=0)
    products = values * tl.load(weights + within)
    products += (values >> 32) * tl.load(weights + within + 1)
    found = tl.sum(products, axis=0)
    term = found * tl.load(chunk_weights + chunk)
    term += (found >> 32) * tl.load(chunk_weights + chunk + 1)
    tl.atomic_add(total, term, sem="relaxed")


def sum_words_triton(words: Tensor, weights: Tensor, chunk_weights: Tensor) -> Tensor:
    """Compute the same as `checksum.sum_words`. A chunk has len(weights) - 1 words."""
    total = torch.zeros(1, dtype=torch.int64, device=words.device)
    chunk = len(weights) - 1
    arrays = words, weights, chunk_weights, total
    grid = (-(-len(words) // chunk),)
    launch(_sum_words_kernel, grid, *arrays, len(words), CHUNK=chunk, num_warps=8)
    return total[0]
