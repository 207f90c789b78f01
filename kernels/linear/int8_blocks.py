"""Sizes of the blocks of INT8 activations, which `cpu_packed_int4` multiplies by 4-bit weights."""

BLOCK_INPUTS = 256
"""Number of inputs of a block. Each block of a row has one scale."""

UNIT_INPUTS = 8
"""Number of inputs whose 4-bit weights are in one 32-bit word. The length of a run (inputs of one
group within a block) is a multiple of it."""
