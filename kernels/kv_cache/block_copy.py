"""Copies blocks of the paged KV cache: within the cache, and to and from a staging buffer.

`kv` is the whole cache, [L, 2, N, H, S, D] contiguous (see `kv_cache/op`). It may have any dtype,
because only bytes are copied. For a block number outside the cache, the kernel reads zeros and
writes nothing.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.kernels.triton_common.aot import AotCase, meta
from penstock.kernels.triton_common.launch import (
    INTS,
    check,
    check_contiguous,
    device_info,
    jit,
    launch,
    tl,
    use_triton,
)

TILE_BYTES = 1 << 14
"""Bytes that a program copies; enough for several loads in flight per thread."""


def gather_blocks(kv: Tensor, blocks: Tensor, layers: slice, heads: slice) -> Tensor:
    """Copy a range of layers and heads of some blocks into a new staging buffer.

    Args:
        kv: the whole cache.
        blocks: [n] block numbers, integers on the cache's device.
        layers: range of layers.
        heads: range of KV heads.

    Returns:
        [layers, 2, n, heads, S, D], contiguous.
    """
    if not use_triton(kv):
        return kv[layers, :, :, heads].index_select(2, blocks)
    _check_cache(kv, layers, heads)
    check("blocks", blocks, ["n"], INTS, like=kv)
    num_sides, (block_size, dim) = kv.shape[1], kv.shape[4:]
    num_layers, num_heads = layers.stop - layers.start, heads.stop - heads.start
    shape = (num_layers, num_sides, len(blocks), num_heads, block_size, dim)
    staged = torch.empty(shape, dtype=kv.dtype, device=kv.device)
    _move(kv, blocks, layers, heads, staged, out=True)
    return staged


def scatter_blocks(kv: Tensor, blocks: Tensor, layers: slice, heads: slice, staged: Tensor) -> None:
    """Copy a staging buffer into a range of layers and heads of some blocks.

    `staged` is a result of `gather_blocks`. The other arguments are those of `gather_blocks`, but
    the block numbers must be distinct.
    """
    if use_triton(kv):
        _move(kv, blocks, layers, heads, staged, out=False)
    else:
        kv[layers, :, :, heads].index_copy_(2, blocks.to(torch.int64), staged)


def copy_blocks(kv: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy whole blocks. All sources are read before any target is written.

    `sources` and `targets` are [n] int64 block numbers on the cache's device. Targets must be
    distinct.
    """
    if use_triton(kv):
        layers, heads = slice(0, kv.shape[0]), slice(0, kv.shape[3])
        check("sources", sources, ["n"], INTS, like=kv)
        check("targets", targets, [len(sources)], INTS, like=kv)
        scatter_blocks(kv, targets, layers, heads, gather_blocks(kv, sources, layers, heads))
    else:
        kv.index_copy_(2, targets, kv.index_select(2, sources))


@jit(unspecialized=("num_chosen", "first_plane"))
def _move_blocks(
    held,  # the cache [planes, N, H, S, D] as words; a plane is the keys or the values of a layer
    staged,  # the staging buffer [copied planes, n, heads, S, D] as words
    blocks,  # [n] block numbers
    num_chosen,  # n, number of blocks to copy
    num_blocks,  # N, number of blocks of the cache
    first_plane,  # first plane to copy
    first_word,  # offset of the first copied head in a block, in words
    num_words,  # number of words of the copied heads of a block, per plane
    block_words,  # number of words of all heads of a block, per plane
    OUT: tl.constexpr,  # True: copy from the cache to `staged`; False: from `staged` to the cache
    TILE: tl.constexpr,  # words per program
):
    """Copy TILE words of one block in one plane. Grid: [copied planes * n, num_words / TILE]."""
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


def _move(
    kv: Tensor, blocks: Tensor, layers: slice, heads: slice, staged: Tensor, out: bool
) -> None:
    _check_move(kv, blocks, layers, heads, staged)
    _, num_sides, num_blocks, num_heads, block_size, dim = kv.shape
    head_bytes = block_size * dim * kv.element_size()
    dtype = next(word for word in _WORDS if head_bytes % word.itemsize == 0)
    head_words = head_bytes // dtype.itemsize
    num_words, tile = staged.shape[3] * head_words, TILE_BYTES // dtype.itemsize
    launch(
        _move_blocks,
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


def _check_move(kv: Tensor, blocks: Tensor, layers: slice, heads: slice, staged: Tensor) -> None:
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
            raise ValueError(f"{name}: a range within [0, {size}) expected, not {span}")


def aot_cases() -> Iterator[AotCase]:
    streams, layers = ("_move_blocks",), slice(0, 32)
    kv, blocks = meta(32, 2, 999, 8, 16, 128), meta(64, dtype=torch.int64)
    yield AotCase(
        "gather 4 of 8 heads",
        lambda: gather_blocks(kv, blocks, layers, slice(4, 8)),
        streams=streams,
    )
    staged = meta(32, 2, 64, 4, 16, 128)
    yield AotCase(
        "scatter 4 of 8 heads",
        lambda: scatter_blocks(kv, blocks, layers, slice(4, 8), staged),
        streams=streams,
    )
