"""Copies blocks of the paged KV cache: within the cache, and to and from a staging buffer.

`kv` is the whole cache, [L, 2, N, H, S, W] contiguous (see `kv_cache/op`). The cache may have any
format, because only bytes are copied: the scales of a block are copied with the block's codes. For
a block number outside the cache, the Triton kernel reads zeros and writes nothing.
"""

import torch
from torch import Tensor

from penstock.kernels.checks import INTS, check, check_contiguous
from penstock.kernels.kv_cache.triton_block_copy import move_blocks_triton
from penstock.kernels.triton_common.launch import use_triton


def gather_blocks(
    kv: Tensor, blocks: Tensor, layers: slice, heads: slice, staged: Tensor | None = None
) -> Tensor:
    """Copy a range of layers and heads of some blocks into a staging buffer.

    Args:
        kv: the whole cache.
        blocks: [n] block numbers, integers on the cache's device.
        layers: range of layers.
        heads: range of KV heads.
        staged: the staging buffer, [layers, 2, n, heads, S, W] contiguous. If None, the function
            creates a new buffer.

    Returns:
        The staging buffer, [layers, 2, n, heads, S, W] contiguous.
    """
    if not use_triton(kv):
        chosen = _indexable(kv)[layers, :, :, heads]
        if staged is None:
            return chosen.index_select(2, blocks).view(kv.dtype)
        torch.index_select(chosen, 2, blocks, out=_indexable(staged))
        return staged
    if staged is None:
        _check_cache(kv, layers, heads)
        num_sides, (block_size, dim) = kv.shape[1], kv.shape[4:]
        num_layers, num_heads = layers.stop - layers.start, heads.stop - heads.start
        shape = (num_layers, num_sides, len(blocks), num_heads, block_size, dim)
        staged = torch.empty(shape, dtype=kv.dtype, device=kv.device)
    _check_staged(kv, blocks, layers, heads, staged)
    move_blocks_triton(kv, blocks, layers, heads, staged, out=True)
    return staged


def scatter_blocks(kv: Tensor, blocks: Tensor, layers: slice, heads: slice, staged: Tensor) -> None:
    """Copy a staging buffer into a range of layers and heads of some blocks.

    `staged` is a result of `gather_blocks`. The other arguments are those of `gather_blocks`, but
    the block numbers must be distinct.
    """
    if use_triton(kv):
        _check_staged(kv, blocks, layers, heads, staged)
        move_blocks_triton(kv, blocks, layers, heads, staged, out=False)
    else:
        chosen = _indexable(kv)[layers, :, :, heads]
        chosen.index_copy_(2, blocks.to(torch.int64), _indexable(staged))


def copy_blocks(kv: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy all layers and heads of blocks. All sources are read before any target is written.

    `sources` and `targets` are [n] int64 block numbers on the cache's device. Targets must be
    distinct.
    """
    if use_triton(kv):
        layers, heads = slice(0, kv.shape[0]), slice(0, kv.shape[3])
        check("sources", sources, ["n"], INTS, like=kv)
        check("targets", targets, [len(sources)], INTS, like=kv)
        scatter_blocks(kv, targets, layers, heads, gather_blocks(kv, sources, layers, heads))
    else:
        kv = _indexable(kv)
        kv.index_copy_(2, targets, kv.index_select(2, sources))


def _indexable(kv: Tensor) -> Tensor:
    """Return a view as uint8 if elements have 8 bits; torch cannot index float8 on every device."""
    return kv.view(torch.uint8) if kv.itemsize == 1 else kv


def _check_staged(kv: Tensor, blocks: Tensor, layers: slice, heads: slice, staged: Tensor) -> None:
    _check_cache(kv, layers, heads)
    _, num_sides, _, _, block_size, dim = kv.shape
    check("blocks", blocks, ["n"], INTS, like=kv)
    shape = [layers.stop - layers.start, num_sides, len(blocks), heads.stop - heads.start]
    check("staged", staged, [*shape, block_size, dim], [kv.dtype], like=kv)
    check_contiguous("staged", staged)


def _check_cache(kv: Tensor, layers: slice, heads: slice) -> None:
    check("kv", kv, ["L", "sides", "N", "H", "S", "D"], [kv.dtype])
    check_contiguous("kv", kv)
    for name, span, size in (("layers", layers, kv.shape[0]), ("heads", heads, kv.shape[3])):
        ends = (span.start, span.stop, span.step or 1)
        if None in ends or not 0 <= ends[0] <= ends[1] <= size or ends[2] != 1:
            raise ValueError(
                f"{name} is {span}: expected slice(start, stop) with 0 <= start <= stop <= {size} "
                "and step 1"
            )
