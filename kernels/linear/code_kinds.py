"""Numbers of the kinds of codes in compiled kernels; see `quantized.Kind`."""

INT4, INT8, FP8, E2M1, NF4, FP4 = range(6)
