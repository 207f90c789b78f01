"""The opcodes of a CPU step graph, and the columns of its integer table of operations.

A row of the table is one operation. `operations` writes the columns and `interpreter` reads them.
A column refers to a buffer by the index of its first element in the arena, and to weights by their
address.
"""

from collections.abc import Iterable
from dataclasses import dataclass

NORM, MATMUL_F32, QUANTIZE, MATMUL_INT8, ATTEND, GATE, ADD = range(7)
GEMV, TOPK_SOFTMAX, PERMUTE_INDEX, PERMUTE, UNPERMUTE_SUM = range(7, 12)
MATMUL_QUANTIZED, QUANTIZE_BLOCKS, MATMUL_INT4 = range(12, 15)
"""Opcodes. `operations` and `matmul_operations` have a class for each opcode."""

INT8_OPCODES = frozenset({QUANTIZE, MATMUL_INT8})
EXPERT_OPCODES = frozenset({GEMV, TOPK_SOFTMAX, PERMUTE_INDEX, PERMUTE, UNPERMUTE_SUM})
INT4_OPCODES = frozenset({QUANTIZE_BLOCKS, MATMUL_INT4})


@dataclass(frozen=True, slots=True)
class Extensions:
    """Groups of opcodes that an interpreter has in addition to those of a dense float32 model.

    Each extension takes a second or more to compile. An interpreter therefore has only the
    extensions that its graphs need.
    """

    int8: bool = False  # True if the interpreter has INT8_OPCODES
    experts: bool = False  # True if the interpreter has EXPERT_OPCODES
    codes: bool = False  # True if the interpreter has MATMUL_QUANTIZED
    int4: bool = False  # True if the interpreter has INT4_OPCODES

    @classmethod
    def of(cls, opcodes: Iterable[int]) -> "Extensions":
        """Return the extensions to which the opcodes belong."""
        found = frozenset(opcodes)
        return cls(
            bool(found & INT8_OPCODES), bool(found & EXPERT_OPCODES), MATMUL_QUANTIZED in found,
            bool(found & INT4_OPCODES),
        )  # fmt: skip

    def __str__(self) -> str:
        names = ("int8", "experts", "codes", "int4")
        return "".join(f"-{name}" for name in names if getattr(self, name))


NUM_COLUMNS = 24

OPCODE, FIRST, COUNT, CONTINUES, NEXT = range(5)
"""Columns of all operations. FIRST and COUNT are `first` and `count` of the `RowRange`. CONTINUES
is 1 if no barrier follows the operation, otherwise 0. NEXT is the row of the next matrix product in
this table. NEXT is -1 if there is no such product, or if the product depends on the experts that
will be chosen."""

X, X_WIDTH, OUT, OUT_WIDTH = range(5, 9)
"""Columns of most operations: the input buffer and its number of features per row, then the same
for the output buffer."""

WEIGHT, WEIGHT_SIZE, BIAS, BIAS_SIZE = range(9, 13)
"""Columns of `Norm`, `Gemv` and matrix products: addresses and numbers of elements."""

BATCH_INVARIANT = 13
"""Column of `MatmulF32`: 1 to use the same implementation for any number of rows, otherwise 0."""

ROW_SCALES, WEIGHT_SCALES, ZERO_POINT_CORRECTION = range(13, 16)
"""Columns of `MatmulInt8`. ROW_SCALES is also a column of `Quantize`."""

CODE_KIND, CODE_SCALES, SCALES_SIZE, ZEROS, ZEROS_SIZE, GROUPS = range(13, 19)
"""Columns of `MatmulQuantized`: a number of `linear/code_kinds`, addresses and sizes."""

OFFSETS, RUN, GROUP_INPUTS = range(18, 21)
"""Columns of `MatmulInt4`, which also has the columns ROW_SCALES, CODE_SCALES, SCALES_SIZE, ZEROS
and ZEROS_SIZE. OFFSETS, RUN and ROW_SCALES are also columns of `QuantizeBlocks`."""

ADDED, NUM_GROUPS, GROUP_SIZE = range(13, 16)
"""Columns of `Norm`, see `operations.Norm`. ADDED is -1 if nothing is added. ADDED is also a column
of `Add`."""

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, ANGLES, ROTARY_DIM, INTERLEAVED = range(9, 16)
LAYER_START, LAYER_SIZE, VALUES_START, WINDOW, SINKS, SLOPES = range(16, 22)
"""Columns of `Attend`. ANGLES is -1 if there is no rotary embedding. LAYER_START and LAYER_SIZE are
the layer's part of the flat KV cache, and VALUES_START is the index of the first value in this
part. SINKS and SLOPES are addresses."""

GATE_KIND = 9
"""Column of `Gate`: a value of GATES."""

LAYOUT, NUM_EXPERTS, CHOICES, TOP_K, NORMALISE = range(9, 14)
EXPERT_WEIGHTS, SHARED, SHARED_GATE = range(14, 17)
"""Columns of MoE operations, see `ExpertLayout` (LAYOUT is its field `at`) and the classes of the
operations. SHARED is -1 if there is no shared expert, and SHARED_GATE is -1 if there is no gate for
the output of a shared expert."""

EPS = 0
SCALE, CAP = 0, 1
LIMIT = 0
NUM_FLOATS = 2
"""Columns of the table of float parameters: EPS for `Norm`, SCALE and CAP for `Attend`, LIMIT for
`Quantize`."""

GATES = {"silu": 0, "gelu": 1}
"""Numbers of the gates; "gelu" means the tanh approximation of gelu."""

ALIGNMENT = 64
"""The number of output columns of a product, and the number of rows of a buffer, are multiples of
ALIGNMENT, because loops write whole blocks."""
