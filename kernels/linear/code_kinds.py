"""Numbers by which compiled kernels identify the kinds of codes (`quantized.Kind`)."""

INT4, INT8, FP8, E2M1, NF4, FP4 = range(6)

FP8_GROUP_INPUTS = 128
"""Number of inputs that share a scale, in FP8 weights and activations with several scales per row.
The weights of DeepSeek V3 have such groups."""
