"""Numbers by which compiled kernels identify the kinds of codes (`quantized.Kind`)."""

INT4, INT8, FP8, E2M1, NF4, FP4 = range(6)
