"""Integers that stand for the kinds of codes (`quantized.Kind`) in compiled kernels."""

INT4, INT8, FP8, E2M1, NF4, FP4 = range(6)
