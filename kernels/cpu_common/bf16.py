"""Numba functions to read rows of a KV cache as float32: in place, or converted from bfloat16.

A bfloat16 is the upper half of a float32, so a shift converts it exactly. numpy has no bfloat16, so
arrays hold the bits as uint16. One block at a time is converted into a scratch array that fits the
CPU's cache. Loops read the scratch array as they read a float32 KV cache.
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
    """Return the array to read after `convert_block`: `rows` if it is float32, else `scratch`."""
    raise NotImplementedError("can only be called from compiled code")


def convert_block(
    rows: Any, row_at: int, begin: int, end: int, head_dim: int, scratch: Floats
) -> int:
    """Make the cache rows [begin, end) readable as float32 in `as_f32(rows, scratch)`.

    Args:
        rows: the cache as a flat array.
        row_at: row s begins at `rows[row_at + s * head_dim]`.
        begin: first row.
        end: last row + 1.
        head_dim: elements per row.
        scratch: at least (end - begin) * head_dim elements.

    Returns:
        The number `at` such that row s begins at `as_f32(rows, scratch)[at + s * head_dim]`.
    """
    raise NotImplementedError("can only be called from compiled code")


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
