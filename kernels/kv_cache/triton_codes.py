"""Functions of Triton kernels that quantize floats to codes of 8 bits: int8 or float8_e4m3fn."""

from penstock.kernels.triton_common.launch import jit, tl


@jit
def e4m3_bits(x):
    """Convert float32 in [-448, 448], or NaN, to the bits of the nearest float8_e4m3fn, as uint8.

    This function is used on chips that cannot convert to float8_e4m3fn, and in Triton's
    interpreter, whose conversion is wrong.
    """
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Round to nearest even at 3 mantissa bits, and change the exponent's bias from 127 to 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below 2^-6, float8 values are 2^-9 apart. float32 values are 2^-9 apart at 2^14, so adding
    # 2^14 rounds x correctly.
    tiny = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0x3C800000, tiny, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@jit
def to_codes(x, inverse, dtype: tl.constexpr, MOST: tl.constexpr):
    """Return x * inverse [N, C] as codes of `dtype`. NaN becomes the code 0.

    `dtype` is int8, float8_e4m3fn, or uint8 for the bits of float8_e4m3fn (see `e4m3_bits`).
    """
    x = x.to(tl.float32) * inverse
    x = tl.where(x == x, x, 0.0)
    # The clamp also prevents the compiler from fusing the product above with the sum below.
    x = tl.clamp(x, -MOST, MOST)
    if dtype == tl.int8:
        # From 2^23 on, float32 values are 1 apart: adding 1.5 * 2^23 rounds to nearest even.
        return ((x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)
    if dtype == tl.uint8:
        return e4m3_bits(x)
    return x.to(dtype)


@jit
def largest_bits(x):
    """Return the largest absolute value of each row of x [N, C] as the bits of a float32, [N, 1].

    The bits have the same order as the values, with NaN largest.
    """
    bits = x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(bits, axis=1, keep_dims=True)
