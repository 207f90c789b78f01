"""Float values of the 4-bit codes e2m1, NF4 and FP4; bit 3 of e2m1 and FP4 is the sign.

Sources: the OCP Microscaling Formats specification 1.0 (e2m1), and the QLoRA paper with the code of
bitsandbytes (NF4, and FP4, which is not e2m1).
"""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = _E2M1 + tuple(-value for value in _E2M1)
"""Sign, 2 bits of exponent with bias 1, 1 bit of mantissa, neither infinity nor NaN."""

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution, scaled to [-1, 1]."""

_FP4 = tuple(value / 12 for value in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
FP4 = _FP4 + tuple(-value for value in _FP4)
"""FP4 of bitsandbytes."""
