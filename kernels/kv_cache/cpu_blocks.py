"""Numba functions that read blocks of a KV cache of any format as float32.

A cache is a flat array. Its dtype identifies the format (`kv_cache/format`): float32, the bits of
bfloat16 as uint16, the bits of FP8 codes as uint8, or INT8 codes as int8. A float32 cache is read
in place. From a cache of another format, one block at a time is converted into a scratch array that
fits into the CPU's cache. Loops then read the scratch array in the same way as a float32 cache.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import types
from numba.core.imputils import impl_ret_borrowed

from penstock.kernels.cpu_common.late_codegen import inner, inner_overload
from penstock.kernels.cpu_common.simd import (
    VECTOR_WIDTH,
    float_of_bits,
    load_bf16_as_f32,
    load_e4m3_as_f32,
    load_i8_as_f32,
    simd_intrinsic,
    splat_wide,
    store,
    vmul,
)

Floats = npt.NDArray[np.float32]

SCALE_BYTES = 2


def page_size(rows: Any, block_size: int, head_dim: int) -> int:
    """Return the number of elements of a page of the flat cache `rows`.

    A page is the keys or the values of one block and one KV head.
    """
    raise NotImplementedError("page_size can only be called from compiled code")


def convert_block(
    rows: Any, page: int, first: int, begin: int, end: int, block_size: int, head_dim: int,
    scratch: Floats,
) -> int:  # fmt: skip
    """Make the positions [begin, end) of a block readable as float32 in `as_f32(rows, scratch)`.

    Args:
        rows: the cache as a flat array.
        page: the block's page begins at `rows[page]`.
        first: position of the block's first slot.
        begin: first position to read, at least `first`.
        end: end of the positions to read, at most `first` + `block_size`.
        block_size: slots per block.
        head_dim: features per slot.
        scratch: float32 array of at least (end - begin) * head_dim elements.

    Returns:
        The number `at` such that position s begins at `as_f32(rows, scratch)[at + s * head_dim]`.
    """
    raise NotImplementedError("convert_block can only be called from compiled code")


@inner()
def half_as_f32(bits: Any) -> Any:
    """Convert the bits of a float16 that is not negative to float32."""
    if bits >= 0x7C00:
        return float_of_bits((bits << 13) | 0x7F800000)
    if bits < 0x400:
        return np.float32(bits) * np.float32(2.0**-24)
    return float_of_bits((bits << 13) + (112 << 23))


@inner()
def e4m3_as_f32(bits: Any) -> Any:
    """Convert the bits of a float8_e4m3fn that is not NaN to float32."""
    size = bits & 0x7F
    if size < 8:
        value = np.float32(size) * np.float32(2.0**-9)
    else:
        value = float_of_bits((size << 20) + (120 << 23))
    return -value if bits >= 0x80 else value


def is_float32(rows: Any) -> bool:
    """Return whether numba's type `rows` is a float32 cache."""
    return bool(rows.dtype == types.float32)


def has_scales(rows: Any) -> bool:
    """Return whether numba's type `rows` is a cache of codes with scales."""
    return rows.dtype in (types.uint8, types.int8)


@simd_intrinsic
def as_f32(typing, rows, scratch):
    """Return the array to read after `convert_block`: a float32 cache itself, else `scratch`."""

    def code(context, builder, signature, arguments):
        array = arguments[0 if is_float32(rows) else 1]
        return impl_ret_borrowed(context, builder, signature.return_type, array)

    return (rows if is_float32(rows) else scratch)(rows, scratch), code


@inner_overload(page_size)
def _page_size_code(rows, block_size, head_dim):
    if has_scales(rows):
        return lambda rows, block_size, head_dim: block_size * (head_dim + SCALE_BYTES)
    return lambda rows, block_size, head_dim: block_size * head_dim


@inner_overload(convert_block)
def _convert_block_code(rows, page, first, begin, end, block_size, head_dim, scratch):
    def unchanged(rows, page, first, begin, end, block_size, head_dim, scratch):
        return page - first * head_dim

    def widen(rows, page, first, begin, end, block_size, head_dim, scratch):
        at, count = page + (begin - first) * head_dim, (end - begin) * head_dim
        whole = count - count % VECTOR_WIDTH
        for i in range(0, whole, VECTOR_WIDTH):
            store(scratch, i, load_bf16_as_f32(rows, at + i))
        bits = scratch.view(np.uint32)
        for i in range(whole, count):
            bits[i] = np.uint32(rows[at + i]) << np.uint32(16)
        return -begin * head_dim

    def dequantize(rows, page, first, begin, end, block_size, head_dim, scratch):
        raw, scale_at = rows.view(np.uint8), page + block_size * head_dim
        whole = head_dim - head_dim % VECTOR_WIDTH
        for s in range(begin, end):
            two = scale_at + (s - first) * SCALE_BYTES
            scale = half_as_f32(np.int64(raw[two]) | np.int64(raw[two + 1]) << 8)
            at, to = page + (s - first) * head_dim, (s - begin) * head_dim
            factors = splat_wide(scale)
            for i in range(0, whole, VECTOR_WIDTH):
                store(scratch, to + i, vmul(_load_codes(rows, at + i), factors))
            for i in range(whole, head_dim):
                scratch[to + i] = _code_as_f32(rows, at + i) * scale
        return -begin * head_dim

    if is_float32(rows):
        return unchanged
    return dequantize if has_scales(rows) else widen


def _load_codes(rows: Any, at: int) -> Any:
    """Load VECTOR_WIDTH codes as a vector of float32."""
    raise NotImplementedError("_load_codes can only be called from compiled code")


@inner_overload(_load_codes)
def _load_codes_code(rows, at):
    if rows.dtype == types.int8:
        return lambda rows, at: load_i8_as_f32(rows, at)
    return lambda rows, at: load_e4m3_as_f32(rows, at)


def _code_as_f32(rows: Any, at: int) -> Any:
    """Load one code as float32."""
    raise NotImplementedError("_code_as_f32 can only be called from compiled code")


@inner_overload(_code_as_f32)
def _code_as_f32_code(rows, at):
    if rows.dtype == types.int8:
        return lambda rows, at: np.float32(rows[at])
    return lambda rows, at: e4m3_as_f32(np.int64(rows[at]))
