"""How operations of a `program` are written in its table, of which numba compiles the loops."""

NORM, PRODUCT, ATTEND, GATE, ADD, LEVELS, LEVEL_PRODUCT = range(7)
"""The first field; the others are as `program.Writer` writes them."""

FIELDS = 20
NEXT = FIELDS - 1
"""The field with the number of the product that comes next; -1: none."""

GATES = {"silu": 0, "gelu": 1}
"""`gelu` in its tanh form."""

EVEN = 64
"""Columns of a product are a multiple of it, and rows of a place: loops may write that many."""
