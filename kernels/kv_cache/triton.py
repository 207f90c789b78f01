"""Triton kernel that writes keys and values to the cache, and its launcher (see `kv_cache/op`).

The kernel also rotates keys before it writes them, and rotates queries in place.
"""

import torch
from torch import Tensor

from penstock.kernels.checks import E4M3
from penstock.kernels.kv_cache.format import format_of, num_features
from penstock.kernels.kv_cache.triton_codes import largest_bits, to_codes
from penstock.kernels.rope.triton import THREADS, load_rotated, rows_of_a_tile, store_rotated
from penstock.kernels.triton_common.launch import device_info, jit, launch, power_of_2, tl


@jit
def _store_scales(largest, target, mask, MOST: tl.constexpr):
    """Store the scales of N rows; return 1 / scale [N, 1] in float32, but 0 for a scale of 0.

    The scales are those of `kv_cache/format.quantize`. `largest` is the result of `largest_bits`,
    and `target` [N, 1] are pointers to the float16 scales.
    """
    exact = largest.to(tl.float32, bitcast=True) * (1.0 / MOST)
    scale = exact.to(tl.float16)
    above = (scale.to(tl.int16, bitcast=True) + 1).to(tl.float16, bitcast=True)
    scale = tl.where(scale.to(tl.float32) < exact, above, scale)
    tl.store(target, scale, mask=mask)
    wide = scale.to(tl.float32)
    return tl.where(wide == 0, 0.0, tl.div_rn(1.0, tl.where(wide == 0, 1.0, wide)))


@jit
def _load_features(
    source,  # [N, 1] pointers to heads
    mask,  # [N, 1] True for the heads to load
    FIRST: tl.constexpr,
    DIM: tl.constexpr,  # D
    SIZE: tl.constexpr,  # D rounded up to a power of two
):
    """Load features [FIRST, DIM) of N heads; return them as [N, SIZE] with zeros elsewhere."""
    columns = tl.arange(0, SIZE)[None, :]
    return tl.load(source + columns, mask=mask & (columns >= FIRST) & (columns < DIM), other=0.0)


@jit
def _store_features(target, x, mask, FIRST: tl.constexpr, DIM: tl.constexpr, SIZE: tl.constexpr):
    """Store features [FIRST, DIM) of N rows x [N, SIZE] at the pointers `target` [N, 1]."""
    columns = tl.arange(0, SIZE)[None, :]
    tl.store(target + columns, x, mask=mask & (columns >= FIRST) & (columns < DIM))


@jit(unspecialized=("num_tokens",))
def _rope_and_cache_kernel(  # noqa: C901
    heads,  # [T, Hq + SIDES H, D]; SIDES is 2 (keys and values), or 1 for MLA
    cos_sin,  # [T, 2, R] rows of `rotary_table`; None means that nothing is rotated
    slots,  # [T] int64 slot of each token
    cache,  # one layer, [SIDES, N, H, S, W]
    scales,  # `cache` viewed as float16, to write the scales of codes; None if there are no scales
    num_tokens,
    num_slots,  # number of slots in the cache: N * S
    side_stride,  # distance from keys to values in `cache`, in elements: N H S W
    token_stride,  # distance from a token to the next in `heads`, in elements
    head_stride,  # distance from a head to the next in `heads`, in elements
    QUERY_HEADS: tl.constexpr,  # Hq
    KV_HEADS: tl.constexpr,  # H
    BLOCK_SIZE: tl.constexpr,  # S
    DIM: tl.constexpr,  # D
    SIZE: tl.constexpr,  # D rounded up to a power of two
    HALF: tl.constexpr,  # R/2
    PAIRS: tl.constexpr,  # R/2 rounded up to a power of two
    INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens per program
    HEADS: tl.constexpr,  # heads per program
    PAGE: tl.constexpr,  # S W, elements of the keys (or values) of one block and KV head
    MOST: tl.constexpr,  # largest code of the cache's format
):
    """Rotate a tile of query heads in place, or write a tile of key or value heads to the cache.

    A tile has TOKENS tokens and HEADS heads. The grid is
    [T / TOKENS, Hq / HEADS + SIDES * (H / HEADS)], with all quotients rounded up. The second index
    counts tiles of query heads, then of key heads, then of value heads. Keys are rotated unless
    `cos_sin` is None.
    """
    query_tiles: tl.constexpr = (QUERY_HEADS + HEADS - 1) // HEADS
    kv_tiles: tl.constexpr = (KV_HEADS + HEADS - 1) // HEADS
    rows = tl.arange(0, TOKENS * HEADS)[:, None]
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + rows // HEADS
    present = tokens < num_tokens
    head_tile = tl.program_id(1)
    if QUERY_HEADS > 0:  # noqa: SIM102 (constexpr: the body is compiled only if true)
        if head_tile < query_tiles:
            numbers = head_tile * HEADS + rows % HEADS
            mask = present & (numbers < QUERY_HEADS)
            pointers = heads + tokens * token_stride + numbers * head_stride
            angles = cos_sin + tokens * (4 * HALF)
            u, v = load_rotated(pointers, angles, mask, HALF, PAIRS, INTERLEAVED)
            store_rotated(pointers, u, v, mask, HALF, PAIRS, INTERLEAVED)
            return
    head_tile -= query_tiles
    side = head_tile // kv_tiles
    numbers = head_tile % kv_tiles * HEADS + rows % HEADS
    slot = tl.load(slots + tokens, mask=present, other=-1)
    mask = (slot >= 0) & (slot < num_slots) & (numbers < KV_HEADS)
    source = heads + tokens * token_stride
    source += (QUERY_HEADS + side * KV_HEADS + numbers) * head_stride
    page = side.to(tl.int64) * side_stride + (slot // BLOCK_SIZE * KV_HEADS + numbers) * PAGE
    target = cache + page + slot % BLOCK_SIZE * DIM
    dtype: tl.constexpr = cache.dtype.element_ty
    if scales is not None:
        scale_target = scales + (page + BLOCK_SIZE * DIM) // 2 + slot % BLOCK_SIZE
    if cos_sin is None or side > 0:
        x = _load_features(source, mask, 0, DIM, SIZE)
        if scales is not None:
            inverse = _store_scales(largest_bits(x), scale_target, mask, MOST)
            x = to_codes(x, inverse, dtype, MOST)
        _store_features(target, x, mask, 0, DIM, SIZE)
    else:
        angles = cos_sin + tokens * (4 * HALF)
        u, v = load_rotated(source, angles, mask, HALF, PAIRS, INTERLEAVED)
        if 2 * HALF < DIM:
            rest = _load_features(source, mask, 2 * HALF, DIM, SIZE)
        if scales is not None:
            largest = tl.maximum(largest_bits(u), largest_bits(v))
            if 2 * HALF < DIM:
                largest = tl.maximum(largest, largest_bits(rest))
            inverse = _store_scales(largest, scale_target, mask, MOST)
            u, v = to_codes(u, inverse, dtype, MOST), to_codes(v, inverse, dtype, MOST)
            if 2 * HALF < DIM:
                rest = to_codes(rest, inverse, dtype, MOST)
        store_rotated(target, u, v, mask, HALF, PAIRS, INTERLEAVED)
        if 2 * HALF < DIM:
            _store_features(target, rest, mask, 2 * HALF, DIM, SIZE)


def rope_and_cache_triton(
    heads: Tensor,
    num_heads: int,
    cos_sin: Tensor | None,
    slots: Tensor,
    layer: Tensor,
    interleaved: bool,
) -> None:
    """Rotate query heads in place; write rotated keys and unchanged values to their slots.

    The arguments are those of `rope_and_cache`, except that `slots` [T] replaces `rows`. Without
    `cos_sin`, nothing is rotated. For slots outside the cache, nothing is written.
    """
    num_sides, num_blocks, num_kv_heads, block_size, slot = layer.shape
    form, dim = format_of(layer.dtype), num_features(layer)
    tokens, tile_heads = rows_of_a_tile(num_kv_heads, dim)
    half = 0 if cos_sin is None else cos_sin.shape[2] // 2
    soft = layer.dtype == E4M3 and not device_info(layer).converts_e4m3
    head_tiles = -(-num_heads // tile_heads) + num_sides * -(-num_kv_heads // tile_heads)
    launch(
        _rope_and_cache_kernel,
        (-(-len(heads) // tokens), head_tiles),
        heads,
        cos_sin,
        slots,
        layer.view(torch.uint8) if soft else layer,
        layer.view(-1).view(torch.float16) if form.has_scales else None,
        len(heads),
        num_blocks * block_size,
        layer.stride(0),
        *heads.stride()[:2],
        QUERY_HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        DIM=dim,
        SIZE=power_of_2(dim),
        HALF=half,
        PAIRS=power_of_2(half),
        INTERLEAVED=interleaved,
        TOKENS=tokens,
        HEADS=tile_heads,
        PAGE=block_size * slot,
        MOST=form.max_code,
        num_warps=device_info(layer).warps(THREADS),
    )
