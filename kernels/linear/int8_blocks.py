"""Sizes of the blocks of INT8 activations, which `cpu_packed_int4` multiplies by 4-bit weights."""

BLOCK_INPUTS = 256
"""Inputs of a row that have one scale."""

UNIT_INPUTS = 8
"""Inputs whose 4-bit weights are in one word of 32 bits; runs are multiples of this."""
