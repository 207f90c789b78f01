"""Writes keys and values into the paged KV cache, with rotary embedding and quantization.

One layer's cache is [2, N, H, S, W]: keys and values, N blocks, H KV heads, S slots per block, W
elements per slot. For floats, W is D, the number of features. For FP8 and INT8 codes with scales, W
is D + 2, and the last two dimensions are a page as described in `kv_cache/format`. For MLA a layer
is [1, N, 1, S, D]: one row per token (see `mla/op`). A slot number is block * S + offset. The whole
cache has the layers as first dimension: [L, 2, N, H, S, W].

A step writes T tokens. The query has Hq heads, and R features of a head are rotated.

On a CPU, float32 values may be written to a bfloat16 cache; the values are rounded to nearest.
Codes and scales are those of `kv_cache/format.quantize`.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.checks import FLOATS, check, check_contiguous
from penstock.kernels.cpu_common.deferred_loops import is_deferred
from penstock.kernels.cpu_common.numba_runtime import (
    MIN_PARALLEL_ELEMENTS,
    configure_numba,
    has_numba,
)
from penstock.kernels.kv_cache.format import (
    flat_array,
    format_of,
    num_features,
    quantize,
    slot_views,
)
from penstock.kernels.kv_cache.triton import rope_and_cache_triton
from penstock.kernels.rope.op import check_rotary, rotate_
from penstock.kernels.triton_common.launch import use_triton


def slot_rows(slots: Tensor, layer_shape: torch.Size) -> Tensor:
    """Convert slots to the argument `rows` of `write_kv` and `rope_and_cache`.

    This function is called once per step for all layers.

    Args:
        slots: [T] int64 slot of each token.
        layer_shape: [2, N, H, S, W].

    Returns:
        With Triton, `slots` itself. Otherwise, int64 numbers [T, 2 H]: page * S + offset for each
        key head and then for each value head of a token. A page is the keys or the values of one
        block and one KV head.
    """
    if use_triton(slots):
        return slots
    num_sides, num_blocks, num_heads, block_size, _ = layer_shape
    heads = torch.arange(num_heads, device=slots.device) * block_size
    sides = torch.arange(num_sides, device=slots.device) * (num_blocks * num_heads * block_size)
    starts = slots // block_size * (num_heads * block_size) + slots % block_size
    return (starts[:, None, None] + sides[:, None] + heads).flatten(1)


def write_kv(layer: Tensor, rows: Tensor, new: Tensor) -> None:
    """Write new keys and values to their slots of one layer.

    Args:
        layer: [2, N, H, S, W] contiguous.
        rows: result of `slot_rows`. The slots must be distinct. Triton kernels write nothing for
            slots outside the cache.
        new: [T, 2 H, D], key heads first, as in the output of a fused qkv projection.
    """
    if use_triton(layer):
        _check_write(new, 0, None, rows, layer)
        rope_and_cache_triton(new, 0, None, rows, layer, False)
        return
    form, block_size = format_of(layer.dtype), layer.shape[3]
    if not form.has_scales:
        layer.view(-1, layer.shape[-1]).index_put_((rows,), new.to(layer.dtype))
        return
    stored, scales = slot_views(layer.view(-1, *layer.shape[3:]))
    found, scale = quantize(new, form)
    at = (rows // block_size, rows % block_size)
    stored.index_put_(at, found.view(torch.uint8))
    scales.index_put_(at, scale[..., None])


def rope_and_cache(
    heads: Tensor,
    num_heads: int,
    cos_sin: Tensor,
    rows: Tensor,
    layer: Tensor,
    interleaved: bool = False,
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
    """
    if use_triton(layer):
        _check_write(heads, num_heads, cos_sin, rows, layer)
        rope_and_cache_triton(heads, num_heads, cos_sin, rows, layer, interleaved)
        return
    if _runs_on_cpu_kernel(heads, cos_sin, rows, layer):
        _rope_and_cache_cpu(heads, num_heads, cos_sin, rows, layer, interleaved)
        return
    num_rotated = num_heads + layer.shape[2]
    rotate_(heads[:, :num_rotated, : cos_sin.shape[2]], cos_sin, interleaved)
    write_kv(layer, rows, heads[:, num_heads:])


def _runs_on_cpu_kernel(heads: Tensor, cos_sin: Tensor, rows: Tensor, layer: Tensor) -> bool:
    """Return whether the numba loops support these tensors.

    The results of the loops and of torch differ in the last bits. The decision must therefore not
    depend on the strides of `heads`, because a slice with one row may be contiguous while a slice
    with several rows is not.
    """
    if layer.device.type != "cpu" or heads.device.type != "cpu" or not has_numba():
        return False
    fits = heads.dtype == cos_sin.dtype == torch.float32 and rows.dtype == torch.int64
    kept = bool(format_of(layer.dtype).array_dtype) and layer.is_contiguous()
    return fits and kept and len(heads) > 0 and not is_deferred(loops_name(layer.dtype))


def _rope_and_cache_cpu(
    heads: Tensor, num_heads: int, cos_sin: Tensor, rows: Tensor, layer: Tensor, interleaved: bool
) -> None:
    kept_heads, dim = 2 * layer.shape[2], num_features(layer)
    check("heads", heads, [len(rows), num_heads + kept_heads, dim], [torch.float32])
    check("rows", rows, [len(heads), kept_heads], [torch.int64])
    if cos_sin.numel():  # an empty `cos_sin` means no rotation
        check_rotary(cos_sin, len(heads), dim, heads)
    kept = flat_array(layer)
    whole = heads.contiguous()
    lost = _cpu_kernel(str(kept.dtype))(
        whole.numpy(), num_heads, cos_sin.contiguous().numpy(), interleaved,
        rows.contiguous().numpy(), kept, layer.shape[3],
        num_threads=1 if heads.numel() < MIN_PARALLEL_ELEMENTS else torch.get_num_threads(),
    )  # fmt: skip
    if whole is not heads:
        heads[:, :num_heads] = whole[:, :num_heads]
    if lost:
        raise IndexError(f"{lost} of the {rows.numel()} entries of rows are outside the cache")


def loops_name(dtype: torch.dtype) -> str:
    """Return the name of the group of compiled loops for a KV cache of this dtype."""
    return f"rotary-{format_of(dtype).name}"


def load_cpu_kernels(dtype: torch.dtype) -> None:
    """Load or compile the numba loops for a KV cache of this dtype."""
    _cpu_kernel(format_of(dtype).array_dtype)


@cache
def _cpu_kernel(kept: str) -> Any:
    configure_numba()
    from penstock.kernels.kv_cache.cpu import rope_and_cache

    return rope_and_cache(kept)


def write_kv_reference(layer: Tensor, slots: Tensor, new: Tensor) -> None:
    """Reference for `write_kv`: writes one slot at a time. `slots` is [T]."""
    num_sides, _, num_heads, block_size, _ = layer.shape
    form = format_of(layer.dtype)
    for slot, heads in zip(slots.tolist(), new, strict=True):
        at = (slice(None), slot // block_size, slice(None), slot % block_size)
        sides = heads.view(num_sides, num_heads, -1)
        if not form.has_scales:
            layer[at] = sides.to(layer.dtype)
            continue
        found, scale = quantize(sides, form)
        stored, scales = slot_views(layer)
        stored[at] = found.view(torch.uint8)
        scales[at] = scale[..., None]


def _check_write(
    heads: Tensor, num_heads: int, cos_sin: Tensor | None, rows: Tensor, layer: Tensor
) -> None:
    check("layer", layer, ["sides", "N", "H", "S", "W"], [layer.dtype])
    check_contiguous("layer", layer)
    num_sides, _, num_kv_heads, _, _ = layer.shape
    dim = num_features(layer)
    name = "new" if cos_sin is None else "heads"
    check(name, heads, ["T", num_heads + num_sides * num_kv_heads, dim], FLOATS, like=layer)
    check("rows", rows, [len(heads)], [torch.int64], like=layer)
    if cos_sin is not None:
        check_rotary(cos_sin, len(heads), dim, heads)
    if not format_of(layer.dtype).has_scales:
        check("layer", layer, list(layer.shape), [heads.dtype])
