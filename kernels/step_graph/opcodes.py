"""Opcodes and fields of the table of operations in a CPU step graph."""

NORM, PRODUCT, ATTEND, GATE, ADD, QUANTIZE, INT8_PRODUCT = range(7)
SCORE, CHOOSE, SORT, GATHER, MIX = range(7, 12)
"""Opcodes: the first field of an operation. `builder.GraphBuilder` defines the other fields."""

FIELDS = 24
NEXT = FIELDS - 1
"""Field: index of the next product in the table, or -1 if there is none or if it depends on which
experts will be chosen."""

FIRST, COUNT, CONTINUES = FIELDS - 2, FIELDS - 3, FIELDS - 4
"""Fields: `first` and `count` of the operation's `RowRange`; 1 if no barrier follows the operation,
otherwise 0."""

GATES = {"silu": 0, "gelu": 1}
"""Numbers of the gates; "gelu" means the tanh approximation of gelu."""

ALIGNMENT = 64
"""Columns of products and rows of buffers are multiples of this; loops write whole blocks."""
