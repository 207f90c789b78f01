"""Converts the operations of a CPU step graph to the tables that the interpreter reads."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.kernels.step_graph import opcodes as codes
from penstock.kernels.step_graph.layout import TOKENS
from penstock.kernels.step_graph.matmul_operations import (
    MatmulF32,
    MatmulInt4,
    MatmulInt8,
    MatmulQuantized,
)
from penstock.kernels.step_graph.operations import (
    Add,
    Norm,
    Operation,
    PermuteIndex,
)


def fuse_adds(operations: Sequence[Operation]) -> list[Operation]:
    """Merge each `Add` into the `Norm` that directly follows, if it normalizes the same buffer.

    A norm of several groups of features is not merged.
    """
    fused: list[Operation] = []
    for operation in operations:
        last = fused[-1] if fused else None
        if (
            isinstance(operation, Norm)
            and isinstance(last, Add)
            and last.x == operation.x
            and operation.size == len(operation.weight)
            and operation.added is None
        ):
            fused[-1] = replace(operation, added=last.added)
        else:
            fused.append(operation)
    return fused


def make_tables(
    operations: Sequence[Operation],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return the two tables that the interpreter reads.

    The integers are [operations, NUM_COLUMNS], and the float parameters [operations, NUM_FLOATS].
    """
    table = np.zeros((len(operations), codes.NUM_COLUMNS), np.int64)
    floats = np.zeros((len(operations), codes.NUM_FLOATS), np.float32)
    for number, operation in enumerate(operations):
        columns = operation.columns()
        table[number, list(columns)] = list(columns.values())
        table[number, [codes.OPCODE, codes.FIRST, codes.COUNT, codes.CONTINUES]] = (
            operation.opcode, operation.rows.first, operation.rows.count, operation.continues,
        )  # fmt: skip
        for column, value in operation.floats().items():
            floats[number, column] = value
    table[:, codes.NEXT] = _next_matmuls(operations)
    return table, floats


def _next_matmuls(operations: Sequence[Operation]) -> list[int]:
    """Return, for each operation, the index of the next product: the value of its column NEXT.

    Threads that wait at the barrier after the operation prefetch weights of this product. If the
    value is -1, nothing is prefetched.
    """
    found, following = [-1] * len(operations), -1
    for number in range(len(operations) - 1, -1, -1):
        operation = operations[number]
        if isinstance(operation, PermuteIndex) and operations[following].rows != TOKENS:
            following = -1
        found[number] = following
        if isinstance(operation, MatmulF32 | MatmulInt8 | MatmulInt4 | MatmulQuantized):
            following = number
    return found
