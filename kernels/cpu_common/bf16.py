"""Rows of a cache as float32, for loops that numba compiles: as they lie, or widened.

A bfloat16 is the upper half of a float32, so that it widens by a shift, exactly. numpy has no such
number: here they are uint16. They are widened a block at a time, into scratch that stays near the
core, and the loops read that as they read a cache of float32; what they sum is then the same.
"""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.core import types
from numba.extending import overload

from penstock.kernels.cpu_common.simd import VECTOR_WIDTH, load_bf16_as_f32, store

Floats = npt.NDArray[np.float32]


def as_f32(rows: Any, scratch: Floats) -> Floats:
    """Where rows are as float32, once `convert_block` has brought them: `rows` itself, or
    scratch."""
    raise NotImplementedError("compiled code only")


def convert_block(
    rows: Any, row_at: int, begin: int, end: int, head_dim: int, scratch: Floats
) -> int:
    """Brings rows from `begin` to `end`, of which row s is at row_at + s D; returns where row 0
    would be in `as_f32`. scratch: [>= (end - begin) D]."""
    raise NotImplementedError("compiled code only")


def _is_float32(rows: Any) -> bool:
    return bool(rows.dtype == types.float32)


@overload(as_f32)
def _float_rows(rows, scratch):
    if _is_float32(rows):
        return lambda rows, scratch: rows
    return lambda rows, scratch: scratch


@overload(convert_block)
def _bring_rows(rows, row_at, begin, end, head_dim, scratch):
    def nothing(rows, row_at, begin, end, head_dim, scratch):
        return row_at

    def widen(rows, row_at, begin, end, head_dim, scratch):
        first, count = row_at + begin * head_dim, (end - begin) * head_dim
        whole = count - count % VECTOR_WIDTH
        for i in range(0, whole, VECTOR_WIDTH):
            store(scratch, i, load_bf16_as_f32(rows, first + i))
        bits = scratch.view(np.uint32)
        for i in range(whole, count):
            bits[i] = np.uint32(rows[first + i]) << np.uint32(16)
        return -begin * head_dim

    return nothing if _is_float32(rows) else widen
