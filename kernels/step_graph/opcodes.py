"""Opcodes and fields of the table of operations in a CPU step graph."""

NORM, PRODUCT, ATTEND, GATE, ADD, QUANTIZE, INT8_PRODUCT = range(7)
SCORE, CHOOSE, SORT, GATHER, MIX = range(7, 12)
"""Opcodes, in the first field. `builder.GraphBuilder` defines the following fields of each."""

FIELDS = 24
NEXT = FIELDS - 1
"""Field: index of the next product in the table; -1: none, or unknown until experts are sorted."""

FIRST, COUNT, CONTINUES = FIELDS - 2, FIELDS - 3, FIELDS - 4
"""Fields: `first` and `count` of the operation's `RowRange`; 1 if no barrier follows it."""

GATES = {"silu": 0, "gelu": 1}
"""Numbers of the gates; `gelu` is its tanh approximation."""

ALIGNMENT = 64
"""Products' columns and buffers' rows are multiples of this, since loops write whole blocks."""
