"""How operations of a `program` are written in its table, of which numba compiles the loops."""

NORM, PRODUCT, ATTEND, GATE, ADD, QUANTIZE, INT8_PRODUCT = range(7)
SCORE, CHOOSE, SORT, GATHER, MIX = range(7, 12)
"""The first field; the others are as `program.GraphBuilder` writes them."""

FIELDS = 24
NEXT = FIELDS - 1
"""The field with the number of the product that comes next; -1: none, or nobody knows yet."""

FIRST, COUNT, CONTINUES = FIELDS - 2, FIELDS - 3, FIELDS - 4
"""Fields: where among a program's whole numbers is the first row that an operation computes, and
how many they are; 1 where threads do not meet after it."""

GATES = {"silu": 0, "gelu": 1}
"""`gelu` in its tanh form."""

ALIGNMENT = 64
"""Columns of a product are a multiple of it, and rows of a place: loops may write that many."""
