"""Triton kernel that writes keys and values to the cache, and its launcher (see `kv_cache/op`).

The kernel also rotates keys before it writes them, and rotates queries in place.
"""

import torch
from torch import Tensor

from penstock.kernels.checks import E4M3_MAX
from penstock.kernels.rope.triton import THREADS, load_rotated, rows_of_a_tile, store_rotated
from penstock.kernels.triton_common.launch import device_info, jit, launch, power_of_2, tl


@jit
def e4m3_bits(x):
    """Convert float32 in [-448, 448], or NaN, to the bits of the nearest float8_e4m3fn, as uint8.

    Used for chips without this conversion, and for Triton's interpreter, which converts wrongly.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Round to nearest even at 3 mantissa bits; change the exponent's bias from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below 2^-6, float8 values are 2^-9 apart, like float32 values at 2^14: adding 2^14 rounds x.
    tiny = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, tiny, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def _quantized(x, factors, most: tl.constexpr, soft: tl.constexpr):
    """Return x * factors as float8_e4m3fn [N, C], clamped to [-most, most]; NaN remains NaN.

    If `soft` is true, the result is the bits as uint8 (see `e4m3_bits`).
    """
    x = tl.clamp(x.to(tl.float32) * factors, -most, most, propagate_nan=tl.PropagateNan.ALL)
    return e4m3_bits(x) if soft else x.to(tl.float8e4nv)


@jit
def _copy_features(
    source,  # [N, 1] pointers to heads
    target,  # [N, 1] pointers to the rows of the cache for these heads
    factors,  # [N, 1] 1 / scale, or None
    mask,  # [N, 1]
    FIRST: tl.constexpr,  # first feature to copy
    DIM: tl.constexpr,  # D
    SIZE: tl.constexpr,  # D rounded up to a power of two
    MOST: tl.constexpr,  # largest value of an FP8 cache
    SOFT: tl.constexpr,  # convert to FP8 with `e4m3_bits`
):
    """Copy features [FIRST, DIM) of N heads into the cache, quantized if `factors` is given."""
    columns = tl.arange(0, SIZE)[None, :]
    inside = mask & (columns >= FIRST) & (columns < DIM)
    values = tl.load(source + columns, mask=inside, other=0.0)
    if factors is not None:
        values = _quantized(values, factors, MOST, SOFT)
    tl.store(target + columns, values, mask=inside)


@jit(unspecialized=("num_tokens",))
def _rope_and_cache_kernel(
    heads,  # [T, Hq + SIDES H, D]
    cos_sin,  # [T, 2, R] rows of `rotary_table`; None: nothing is rotated
    slots,  # [T] int64 slot of each token
    cache,  # [SIDES, N, H, S, D]
    scales,  # [SIDES, H] scales of an FP8 cache, or None
    num_tokens,
    num_slots,  # number of slots in the cache: N * S
    side_stride,  # N H S D, distance from keys to values in `cache`, in elements
    token_stride,  # stride of the tokens in `heads`, in elements
    head_stride,  # stride of the heads in `heads`, in elements
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
    MOST: tl.constexpr,  # largest value of an FP8 cache
    SOFT: tl.constexpr,  # convert to FP8 with `e4m3_bits`, not with the chip's conversion
):
    """Rotate a tile of query heads in place, or write a tile of key or value heads to the cache.

    A tile is TOKENS x HEADS. Grid: [T / TOKENS, Hq / HEADS + SIDES H / HEADS]; the second index
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
    row = (slot // BLOCK_SIZE * KV_HEADS + numbers) * BLOCK_SIZE + slot % BLOCK_SIZE
    target = cache + side.to(tl.int64) * side_stride + row * DIM
    factors = None
    if scales is not None:
        factors = 1.0 / tl.load(scales + side * KV_HEADS + numbers, mask=mask, other=1.0)
    if cos_sin is None or side > 0:
        _copy_features(source, target, factors, mask, 0, DIM, SIZE, MOST, SOFT)
    else:
        angles = cos_sin + tokens * (4 * HALF)
        u, v = load_rotated(source, angles, mask, HALF, PAIRS, INTERLEAVED)
        if factors is not None:
            u = _quantized(u, factors, MOST, SOFT)
            v = _quantized(v, factors, MOST, SOFT)
        store_rotated(target, u, v, mask, HALF, PAIRS, INTERLEAVED)
        if 2 * HALF < DIM:
            _copy_features(source, target, factors, mask, 2 * HALF, DIM, SIZE, MOST, SOFT)


def rope_and_cache_triton(
    heads: Tensor,
    num_heads: int,
    cos_sin: Tensor | None,
    slots: Tensor,
    layer: Tensor,
    interleaved: bool,
    scales: Tensor | None,
) -> None:
    """Rotate query heads in place; write rotated keys and unchanged values to their slots.

    Arguments as in `rope_and_cache`, with `slots` [T] for `rows`. Without `cos_sin`, nothing is
    rotated. Slots outside the cache are ignored.
    """
    num_sides, num_blocks, num_kv_heads, block_size, dim = layer.shape
    tokens, tile_heads = rows_of_a_tile(num_kv_heads, dim)
    half = 0 if cos_sin is None else cos_sin.shape[2] // 2
    soft = scales is not None and not device_info(layer).converts_e4m3
    head_tiles = -(-num_heads // tile_heads) + num_sides * -(-num_kv_heads // tile_heads)
    launch(
        _rope_and_cache_kernel,
        (-(-len(heads) // tokens), head_tiles),
        heads,
        cos_sin,
        slots,
        layer.view(torch.uint8) if soft else layer,
        scales,
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
        MOST=E4M3_MAX,
        SOFT=soft,
        num_warps=device_info(layer).warps(THREADS),
    )
