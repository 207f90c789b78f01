"""Numba functions that write to a KV cache of any format.

A cache is a flat array (`format.flat_array`), and the dtype of the array identifies the format.
Codes and scales are bitwise the same as those of `format.quantize`.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import types

from penstock.kernels.cpu_common.late_codegen import inner, inner_overload
from penstock.kernels.cpu_common.magnitude import largest_magnitude_bits
from penstock.kernels.cpu_common.simd import bits_of_float, float_of_bits
from penstock.kernels.kv_cache.cpu_blocks import (
    SCALE_BYTES,
    has_scales,
    is_float32,
    page_size,
)
from penstock.kernels.kv_cache.format import FORMATS

Floats = npt.NDArray[np.float32]

_HALF_INF, _HALF_NAN = 0x7C00, 0x7E00
"""Bits of infinity and of NaN as float16."""

_PER_CODE_INT8 = np.float32(1 / FORMATS["int8"].max_code)
_PER_CODE_E4M3 = np.float32(1 / FORMATS["fp8"].max_code)


def store_kv(head: Floats, rows: Any, slot: int, block_size: int) -> None:
    """Write the features of a head to one slot of a page.

    Args:
        head: [D] contiguous.
        rows: the cache as a flat array.
        slot: page * block_size + offset in the page.
        block_size: slots per page.
    """
    raise NotImplementedError("store_kv can only be called from compiled code")


@inner()
def scale_bits(head: Floats, per_code: Any) -> Any:
    """Return the float16 bits of a head's scale: largest absolute value * `per_code`, rounded up.

    If the head contains a NaN, the scale is NaN. A scale above the largest float16 becomes
    infinity.
    """
    most = largest_magnitude_bits(head)
    if most > 0x7F800000:
        return np.int64(_HALF_NAN)
    exact = float_of_bits(np.int64(most)) * per_code
    if exact < np.float32(2.0**-14):  # a subnormal float16, which is a multiple of 2^-24
        return np.int64(np.ceil(exact * np.float32(2.0**24)))
    # Drop 13 bits of the mantissa, rounding up, and change the exponent's bias from 127 to 15.
    return min(((bits_of_float(exact) + 0x1FFF) >> 13) - (112 << 10), np.int64(_HALF_INF))


@inner()
def inverse_of_half(bits: Any) -> Any:
    """Return 1 / x as float32, where x is the float16 with these bits; 0 if x is 0."""
    if bits == 0 or bits == _HALF_INF:
        return np.float32(0)
    if bits > _HALF_INF:
        return np.float32(np.nan)
    if bits < 0x400:
        scale = np.float32(bits) * np.float32(2.0**-24)
    else:
        scale = float_of_bits((bits << 13) + (112 << 23))
    return np.float32(1) / scale


@inner()
def e4m3_code(x: Any) -> Any:
    """Convert a float32 in [-448, 448] to the bits of the nearest float8_e4m3fn."""
    bits = bits_of_float(x)
    size = bits & 0x7FFFFFFF
    # Below 2^-6, float8 values are 2^-9 apart. float32 values are 2^-9 apart at 2^14, so adding
    # 2^14 rounds x correctly.
    tiny = bits_of_float(abs(x) + np.float32(16384)) - 0x46800000
    # Round to nearest even at 3 mantissa bits, and change the exponent's bias from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    code = tiny if size < 0x3C800000 else normal
    return np.uint8(code | ((bits >> 24) & 0x80))


@inner_overload(store_kv)
def _store_kv_code(head, rows, slot, block_size):
    def wide(head, rows, slot, block_size):
        out = rows[slot * len(head) : (slot + 1) * len(head)]
        for i in range(len(out)):
            out[i] = head[i]

    def narrow(head, rows, slot, block_size):
        bits, out = head.view(np.uint32), rows[slot * len(head) : (slot + 1) * len(head)]
        for i in range(len(bits)):
            # Round to nearest even. NaN remains NaN.
            rounded = bits[i] + np.uint32(0x7FFF) + ((bits[i] >> np.uint32(16)) & np.uint32(1))
            is_nan = (bits[i] & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            out[i] = np.uint16(0x7FC0) if is_nan else np.uint16(rounded >> np.uint32(16))

    def quantize(head, rows, slot, block_size):
        page = slot // block_size * page_size(rows, block_size, len(head))
        offset, raw = slot % block_size, rows.view(np.uint8)
        scale = scale_bits(head, _per_code(rows))
        two = page + block_size * len(head) + offset * SCALE_BYTES
        raw[two], raw[two + 1] = np.uint8(scale & 0xFF), np.uint8(scale >> 8)
        inverse, at = inverse_of_half(scale), page + offset * len(head)
        _store_codes(head, inverse, rows[at : at + len(head)])

    if is_float32(rows):
        return wide
    return quantize if has_scales(rows) else narrow


def _per_code(rows: Any) -> Any:
    """Return the float32 1 / (largest code of the cache's format)."""
    raise NotImplementedError("_per_code can only be called from compiled code")


@inner_overload(_per_code)
def _per_code_code(rows):
    if rows.dtype == types.int8:
        return lambda rows: _PER_CODE_INT8
    return lambda rows: _PER_CODE_E4M3


def _store_codes(head: Floats, inverse: Any, out: Any) -> None:
    """Round `head * inverse` to codes and write the codes to `out` [D]. NaN becomes the code 0."""
    raise NotImplementedError("_store_codes can only be called from compiled code")


@inner_overload(_store_codes)
def _store_codes_code(head, inverse, out):
    def int8(head, inverse, out):
        for i in range(len(out)):
            scaled = head[i] * inverse
            out[i] = np.int8(np.int32(np.rint(scaled if scaled == scaled else np.float32(0))))

    def e4m3(head, inverse, out):
        for i in range(len(out)):
            scaled = head[i] * inverse
            out[i] = e4m3_code(scaled if scaled == scaled else np.float32(0))

    return int8 if out.dtype == types.int8 else e4m3
