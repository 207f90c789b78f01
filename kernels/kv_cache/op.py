"""Writes keys and values into the paged KV cache, with rotary embedding and quantization.

One layer's cache is [2, N, H, S, D]: keys and values, N blocks, H KV heads, S slots per block, D
features. For MLA it is [1, N, 1, S, D]: one row per token (see `mla/op`). A slot number is
block * S + offset. The whole cache has the layers as first dimension: [L, 2, N, H, S, D].

On a CPU, float32 values may be written to a bfloat16 cache; they are rounded to nearest. An FP8
cache (float8_e4m3fn) stores x / scale, clamped to [-448, 448]. The scales are float32 [2, H]: for
keys and for values, one per KV head.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.cpu_common.numba_runtime import (
    MIN_PARALLEL_ELEMENTS,
    configure_numba,
    has_numba,
)
from penstock.kernels.rope.op import (
    THREADS,
    check_rotary,
    load_rotated,
    rotate_,
    rows_of_a_tile,
    store_rotated,
)
from penstock.kernels.triton_common.aot import AotCase, meta
from penstock.kernels.triton_common.launch import (
    E4M3,
    E4M3_MAX,
    FLOATS,
    check,
    check_contiguous,
    device_info,
    jit,
    launch,
    power_of_2,
    tl,
    use_triton,
)


def slot_rows(slots: Tensor, layer_shape: torch.Size) -> Tensor:
    """Convert slots to the argument `rows` of `write_kv` and `rope_and_cache`.

    This function is called once per step for all layers.

    Args:
        slots: [T] int64 slot of each token.
        layer_shape: [2, N, H, S, D].

    Returns:
        With Triton, `slots` itself. Otherwise [T, 2 H] int64 row numbers in the cache, viewed as
        rows of D features; key heads come first.
    """
    if use_triton(slots):
        return slots
    num_sides, num_blocks, num_heads, block_size, _ = layer_shape
    heads = torch.arange(num_heads, device=slots.device) * block_size
    sides = torch.arange(num_sides, device=slots.device) * (num_blocks * num_heads * block_size)
    starts = slots // block_size * (num_heads * block_size) + slots % block_size
    return (starts[:, None, None] + sides[:, None] + heads).flatten(1)


def write_kv(layer: Tensor, rows: Tensor, new: Tensor, scales: Tensor | None = None) -> None:
    """Write new keys and values to their slots of one layer.

    Args:
        layer: [2, N, H, S, D] contiguous.
        rows: result of `slot_rows`, for distinct slots. Triton kernels ignore slots that are
            outside the cache.
        new: [T, 2 H, D], key heads first, as in the output of a fused qkv projection.
        scales: [2, H] float32 scales of an FP8 cache, else None.
    """
    if use_triton(layer):
        _write(new, 0, None, rows, layer, False, scales)
        return
    if scales is not None:
        new = (new.float() * (1 / scales).view(-1, 1)).clamp_(-E4M3_MAX, E4M3_MAX).to(layer.dtype)
        layer, new = layer.view(torch.uint8), new.view(torch.uint8)
    layer.view(-1, layer.shape[-1]).index_put_((rows,), new.to(layer.dtype))


def rope_and_cache(
    heads: Tensor,
    num_heads: int,
    cos_sin: Tensor,
    rows: Tensor,
    layer: Tensor,
    interleaved: bool = False,
    scales: Tensor | None = None,
) -> None:
    """Rotate queries in place; write rotated keys and unchanged values to the cache, in one launch.

    Args:
        heads: [T, Hq + 2 H, D] output of a fused qkv projection, query heads first. The key and
            value heads may be overwritten.
        num_heads: Hq.
        cos_sin: [T, 2, R] rows of `rotary_table`; the first R features of a head are rotated.
        rows: see `write_kv`.
        layer: see `write_kv`.
        interleaved: True if feature pairs are (2i, 2i + 1), False if they are (i, i + R/2).
        scales: see `write_kv`.
    """
    if use_triton(layer):
        _write(heads, num_heads, cos_sin, rows, layer, interleaved, scales)
        return
    if scales is None and _runs_on_cpu_kernel(heads, cos_sin, rows, layer):
        _rope_and_cache_cpu(heads, num_heads, cos_sin, rows, layer, interleaved)
        return
    num_rotated = num_heads + layer.shape[2]
    rotate_(heads[:, :num_rotated, : cos_sin.shape[2]], cos_sin, interleaved)
    write_kv(layer, rows, heads[:, num_heads:], scales)


def _runs_on_cpu_kernel(heads: Tensor, cos_sin: Tensor, rows: Tensor, layer: Tensor) -> bool:
    """Return whether the numba loops support these tensors.

    The loops and torch give results that differ in the last bits. The decision must therefore not
    depend on the strides of `heads`: a single row may be contiguous where several rows are not.
    """
    if layer.device.type != "cpu" or heads.device.type != "cpu" or not has_numba():
        return False
    fits = heads.dtype == cos_sin.dtype == torch.float32 and rows.dtype == torch.int64
    kept = layer.dtype in (torch.float32, torch.bfloat16) and layer.is_contiguous()
    return fits and kept and len(heads) > 0


def _rope_and_cache_cpu(
    heads: Tensor, num_heads: int, cos_sin: Tensor, rows: Tensor, layer: Tensor, interleaved: bool
) -> None:
    kept_heads = 2 * layer.shape[2]
    check("heads", heads, [len(rows), num_heads + kept_heads, layer.shape[-1]], [torch.float32])
    check("rows", rows, [len(heads), kept_heads], [torch.int64])
    if cos_sin.numel():  # if empty, nothing is rotated
        check_rotary(cos_sin, len(heads), layer.shape[-1], heads)
    narrow = layer.dtype == torch.bfloat16
    flat = layer.view(-1)
    kept = flat.view(torch.int16).numpy().view(np.uint16) if narrow else flat.numpy()
    whole = heads.contiguous()
    lost = _cpu_kernel(narrow)(
        whole.numpy(), num_heads, cos_sin.contiguous().numpy(), interleaved,
        rows.contiguous().numpy(), kept,
        num_threads=1 if heads.numel() < MIN_PARALLEL_ELEMENTS else torch.get_num_threads(),
    )  # fmt: skip
    if whole is not heads:
        heads[:, :num_heads] = whole[:, :num_heads]
    if lost:
        raise IndexError(f"rows: {lost} are outside the cache of {flat.numel()} elements")


def load_cpu_kernels(narrow: bool) -> None:
    """Load or compile the numba loops for a bfloat16 cache if `narrow`, otherwise for float32."""
    _cpu_kernel(narrow)


@cache
def _cpu_kernel(narrow: bool) -> Any:
    configure_numba()
    from penstock.kernels.kv_cache.cpu import rope_and_cache

    return rope_and_cache(narrow)


def write_kv_reference(
    layer: Tensor, slots: Tensor, new: Tensor, scales: Tensor | None = None
) -> None:
    """Reference for `write_kv`: writes one slot at a time. `slots` is [T]."""
    num_sides, _, num_heads, block_size, head_dim = layer.shape
    for slot, heads in zip(slots.tolist(), new, strict=True):
        sides = heads.view(num_sides, num_heads, head_dim)
        if scales is not None:
            sides = (sides.double() / scales.double()[:, :, None]).clamp(-E4M3_MAX, E4M3_MAX)
        layer[:, slot // block_size, :, slot % block_size] = sides.to(layer.dtype)


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
def _write_tokens(
    heads,  # [T, Hq + SIDES H, D]
    cos_sin,  # [T, 2, R] rows of `rotary_table`; None: nothing is rotated
    slots,  # [T] int64 slot of each token
    cache,  # [SIDES, N, H, S, D]
    scales,  # [SIDES, H] scales of an FP8 cache, or None
    num_tokens,
    num_slots,  # N S, number of slots in the cache
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


def _write(
    heads: Tensor,
    num_heads: int,
    cos_sin: Tensor | None,
    slots: Tensor,
    layer: Tensor,
    interleaved: bool,
    scales: Tensor | None,
) -> None:
    _check_write(heads, num_heads, cos_sin, slots, layer, scales)
    num_sides, num_blocks, num_kv_heads, block_size, dim = layer.shape
    tokens, tile_heads = rows_of_a_tile(num_kv_heads, dim)
    half = 0 if cos_sin is None else cos_sin.shape[2] // 2
    soft = scales is not None and not device_info(layer).converts_e4m3
    head_tiles = -(-num_heads // tile_heads) + num_sides * -(-num_kv_heads // tile_heads)
    launch(
        _write_tokens,
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


def _check_write(
    heads: Tensor,
    num_heads: int,
    cos_sin: Tensor | None,
    slots: Tensor,
    layer: Tensor,
    scales: Tensor | None,
) -> None:
    check("layer", layer, ["sides", "N", "H", "S", "D"], [layer.dtype])
    check_contiguous("layer", layer)
    num_sides, _, num_kv_heads, _, dim = layer.shape
    name = "new" if cos_sin is None else "heads"
    check(name, heads, ["T", num_heads + num_sides * num_kv_heads, dim], FLOATS, like=layer)
    check("rows", slots, [len(heads)], [torch.int64], like=layer)
    if cos_sin is not None:
        check_rotary(cos_sin, len(heads), dim, heads)
    if scales is None:
        check("layer", layer, list(layer.shape), [heads.dtype])
        return
    check("layer", layer, list(layer.shape), [E4M3])
    check("scales", scales, [num_sides, num_kv_heads], [torch.float32], like=layer)
    check_contiguous("scales", scales)


def aot_cases() -> Iterator[AotCase]:
    streams = ("_write_tokens",)
    slots = meta(64, dtype=torch.int64)
    plain, narrow = meta(2, 999, 8, 16, 128), meta(2, 999, 8, 16, 128, dtype=E4M3)
    heads, angles = meta(64, 48, 128), meta(64, 2, 128)
    scales = meta(2, 8, dtype=torch.float32)
    yield AotCase(
        "32/8 heads of 128",
        lambda: rope_and_cache(heads, 32, angles, slots, plain),
        streams=streams,
    )
    yield AotCase(
        "32/8 heads of 128, e4m3",
        lambda: rope_and_cache(heads, 32, angles, slots, narrow, False, scales),
        streams=streams,
    )
    yield AotCase(
        "one of 8/1 heads of 128, 64 turning as neighbours",
        lambda: rope_and_cache(
            meta(64, 10, 128), 8, meta(64, 2, 64), slots, meta(2, 999, 1, 16, 128), True
        ),
        streams=streams,
    )
    yield AotCase(
        "latent rows of 576",
        lambda: write_kv(meta(1, 999, 1, 64, 576), slots, meta(64, 1, 576)),
        streams=streams,
    )
