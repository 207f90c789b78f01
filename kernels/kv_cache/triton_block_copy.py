"""Triton kernel that copies blocks between the cache and a staging buffer (see `block_copy`)."""

import torch
from torch import Tensor

from penstock.kernels.triton_common.launch import device_info, jit, launch, tl

TILE_BYTES = 1 << 14
"""Number of bytes that a program copies. Each thread then has several loads in flight."""


@jit(unspecialized=("num_chosen", "first_plane"))
def _move_blocks_kernel(
    # The cache [planes, N, H, S, W], viewed as integers of 1 to 8 bytes (words). A plane is the
    # keys or the values of a layer.
    held,
    staged,  # the staging buffer [copied planes, n, heads, S, W], viewed as words
    blocks,  # [n] block numbers
    num_chosen,  # n, number of blocks to copy
    num_blocks,  # N, number of blocks of the cache
    first_plane,  # first plane to copy
    first_word,  # offset of the first copied head in a block, in words
    num_words,  # number of words of the copied heads of a block, per plane
    block_words,  # number of words of all heads of a block, per plane
    OUT: tl.constexpr,  # True to copy from the cache to `staged`, False for the other direction
    TILE: tl.constexpr,  # number of words that a program copies
):
    """Copy TILE words of one block in one plane.

    The grid is [copied planes * n, num_words / TILE], rounded up.
    """
    piece = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * TILE + tl.arange(0, TILE)
    block = tl.load(blocks + piece % num_chosen).to(tl.int64)
    inside = words < num_words
    there = inside & (block >= 0) & (block < num_blocks)
    plane = piece // num_chosen + first_plane
    here = held + (plane * num_blocks + block) * block_words + first_word + words
    away = staged + piece * num_words + words
    if OUT:
        tl.store(away, tl.load(here, mask=there, other=0), mask=inside)
    else:
        tl.store(here, tl.load(away, mask=there, other=0), mask=there)


def move_blocks_triton(
    kv: Tensor, blocks: Tensor, layers: slice, heads: slice, staged: Tensor, out: bool
) -> None:
    """Copy from the cache to `staged` if `out`, otherwise from `staged` to the cache.

    The other arguments are those of `scatter_blocks`.
    """
    _, num_sides, num_blocks, num_heads, block_size, dim = kv.shape
    head_bytes = block_size * dim * kv.element_size()
    dtype = next(word for word in _WORDS if head_bytes % word.itemsize == 0)
    head_words = head_bytes // dtype.itemsize
    num_words, tile = staged.shape[3] * head_words, TILE_BYTES // dtype.itemsize
    launch(
        _move_blocks_kernel,
        (staged.shape[0] * num_sides * len(blocks), -(-num_words // tile)),
        kv.view(-1).view(dtype),
        staged.view(-1).view(dtype),
        blocks,
        len(blocks),
        num_blocks,
        layers.start * num_sides,
        heads.start * head_words,
        num_words,
        num_heads * head_words,
        OUT=out,
        TILE=tile,
        num_warps=device_info(kv).warps(128),
    )


_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
