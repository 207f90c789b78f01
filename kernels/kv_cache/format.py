"""Formats of the KV cache: floats, or 8-bit codes with one scale per token and KV head.

A **page** is the keys or the values of one block and one KV head: S slots of D features. The cache
of all layers is [L, sides, N, H, S, W] contiguous, and [S, W] are the elements of a page. There are
two sides, keys and values, but only one for MLA. `W` is `KvCacheFormat.slot_elements(D)`:

- Floats (W = D): a slot is a row of D elements.
- Codes (W = D + 2): the page contains S rows of D codes, then S float16 scales, one per slot. The
  last two dimensions therefore only give the size of a page. To index codes or scales, use the
  views that `codes` and `scales` return. Whole pages can be copied as bytes.

The value of a feature is its code times the scale of its slot. `quantize` defines codes and scales.
They depend only on the D features of the same token and head. All implementations give bitwise
identical codes and scales.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.checks import E4M3

SCALE_BYTES = torch.float16.itemsize


@dataclass(frozen=True, slots=True)
class KvCacheFormat:
    """The format in which a KV cache stores features, and the sizes that follow from the format."""

    name: str  # value of `kv_cache_dtype`
    dtype: torch.dtype  # dtype of the cache's elements; identifies the format
    array_dtype: str = ""  # numpy dtype of `flat_array`; "" if no CPU loop supports the format
    max_code: float = 0.0  # largest code; 0 for floats, which have no scales

    @property
    def has_scales(self) -> bool:
        return self.max_code > 0

    @property
    def value_gain(self) -> float:
        """Return the smallest power of two >= `max_code`; 1 for a format without scales.

        Kernels multiply the softmax weights by the scales of the values and by this gain, so that
        the products do not underflow in float16. They divide the final sum by the gain.
        """
        return 2.0 ** math.ceil(math.log2(self.max_code)) if self.has_scales else 1.0

    def slot_elements(self, num_features: int) -> int:
        """Return W, the elements per slot of a page whose slots have `num_features` features.

        Raises:
            ValueError: scales would not be aligned, because the number of features is odd.
        """
        if self.has_scales and num_features % 2:
            raise ValueError(
                f"kv_cache_dtype {self.name} needs an even number of features per head, "
                f"not {num_features}: set kv_cache_dtype to 'auto'"
            )
        return num_features + (SCALE_BYTES if self.has_scales else 0)

    def token_bytes(self, kv_shape: tuple[int, int, int]) -> int:
        """Return the number of bytes of one position in one layer.

        Args:
            kv_shape: (sides, KV heads, features) of one position in a layer's cache.
        """
        sides, num_heads, num_features = kv_shape
        return sides * num_heads * self.slot_elements(num_features) * self.dtype.itemsize


FORMATS = {
    each.name: each
    for each in (
        KvCacheFormat("float32", torch.float32, "float32"),
        KvCacheFormat("bfloat16", torch.bfloat16, "uint16"),
        KvCacheFormat("float16", torch.float16),
        KvCacheFormat("fp8", E4M3, "uint8", max_code=448.0),
        KvCacheFormat("int8", torch.int8, "int8", max_code=127.0),
    )
}
"""All formats, by name."""

_BY_DTYPE = {each.dtype: each for each in FORMATS.values()}


def format_of(dtype: torch.dtype) -> KvCacheFormat:
    """Return the format of a cache whose elements have this dtype.

    For a dtype that is not in `FORMATS`, the result is a format without scales and without support
    by CPU loops.
    """
    return _BY_DTYPE.get(dtype) or KvCacheFormat(str(dtype).removeprefix("torch."), dtype)


def num_features(layer: Tensor) -> int:
    """Return D, the number of features per slot of a layer [..., S, W]."""
    return layer.shape[-1] - (SCALE_BYTES if format_of(layer.dtype).has_scales else 0)


def flat_array(cache: Tensor) -> npt.NDArray[Any]:
    """Return a contiguous cache on a CPU as a flat array, which CPU loops read and write.

    The dtype of the array identifies the format: float32, the bits of bfloat16 as uint16, the bits
    of FP8 codes as uint8, or INT8 codes as int8.
    """
    raw = cache.view(-1).view(torch.uint8).numpy()
    return raw.view(format_of(cache.dtype).array_dtype)


def codes(cache: Tensor) -> Tensor:
    """Return a view [..., S, D] of the elements or codes of a cache [..., S, W] of any format.

    Only the last two dimensions of `cache` must be contiguous.
    """
    if not format_of(cache.dtype).has_scales:
        return cache
    dim = num_features(cache)
    return cache.as_strided((*cache.shape[:-1], dim), (*cache.stride()[:-2], dim, 1))


def scales(cache: Tensor) -> Tensor:
    """Return a view [..., S] float16 of the scales of a cache [..., S, W] with scales.

    Only the last two dimensions of `cache` must be contiguous.
    """
    block_size, halves = cache.shape[-2], cache.view(torch.float16)
    strides, start = halves.stride()[:-2], block_size * num_features(cache) // SCALE_BYTES
    return halves.as_strided(cache.shape[:-1], (*strides, 1), halves.storage_offset() + start)


def slot_views(cache: Tensor) -> tuple[Tensor, ...]:
    """Return views [..., S, n] of a cache [..., S, W] that together contain all bytes of each slot.

    For floats, the only view is the cache itself. For codes with scales, there are two views: codes
    and scales. The codes are viewed as uint8, because few operations of torch support float8.
    """
    if not format_of(cache.dtype).has_scales:
        return (cache,)
    return codes(cache).view(torch.uint8), scales(cache)[..., None]


def quantize(x: Tensor, form: KvCacheFormat) -> tuple[Tensor, Tensor]:
    """Quantize each row of `x` [..., D] with its own scale. All other implementations must match.

    The scale of a row is its largest absolute value divided by the largest code, rounded up to
    float16. No code is therefore clipped. For INT8, the error of `dequantize` is at most scale / 2.
    For FP8, the error is at most the larger of 2^-4 |value| and 2^-10 scale. If a row contains NaN
    or infinity, or its scale exceeds the largest float16, the scale becomes NaN or infinity.
    `dequantize` then gives no finite value for this row.

    Returns:
        Codes [..., D] of the format's dtype, and scales [...] float16.
    """
    x = x.float()
    exact = x.abs().amax(-1) * (1.0 / form.max_code)
    scale = exact.half()
    above = (scale.view(torch.int16) + 1).view(torch.float16)
    scale = torch.where(scale.float() < exact, above, scale)
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale.float())
    scaled = (x * inverse[..., None]).nan_to_num(0.0)
    return (scaled if form.dtype == E4M3 else scaled.round()).to(form.dtype), scale


def to_cache(x: Tensor, form: KvCacheFormat) -> Tensor:
    """Return a new cache [..., S, W] of the format `form` with the keys or values x [..., S, D]."""
    if not form.has_scales:
        return x.to(form.dtype, copy=True)
    shape = (*x.shape[:-1], form.slot_elements(x.shape[-1]))
    cache = torch.empty(shape, dtype=form.dtype, device=x.device)
    found, scale = quantize(x, form)
    codes(cache).copy_(found)
    scales(cache).copy_(scale)
    return cache


def dequantize(cache: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the keys or values of a cache as floats [..., S, D] of the dtype `dtype`.

    Args:
        cache: [..., S, W] in any format; W is D, or D + 2 for codes with scales.
        dtype: dtype of the result.
    """
    if not format_of(cache.dtype).has_scales:
        return cache.to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return (codes(cache).to(wide) * scales(cache).to(wide)[..., None]).to(dtype)
