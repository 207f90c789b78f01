"""AVX-512 loops of `quantized`, compiled by numba.

A tile of `BLOCK_K` inputs and one panel of outputs is converted to float32. It stays in the L1 or
L2 cache while the rows of x are multiplied by it; for a single row, `cpu_row_of_codes` converts in
registers. The multiplications are those of `cpu_f32_avx512` in the same order, so the result is
bitwise that of float32 panels with the same weights.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.numba_runtime import entry, load_entries, run_serial_or_parallel
from penstock.kernels.cpu_common.simd import VECTOR_WIDTH, load_wide, store, vmul
from penstock.kernels.linear.code_kinds import E2M1, FP8, INT4, INT8, NF4
from penstock.kernels.linear.cpu_f32_avx512 import BLOCK_K, PANEL, TILE_ROWS, tile
from penstock.kernels.linear.cpu_load_codes import (
    load_e4m3,
    load_high_bits,
    load_high_e2m1,
    load_high_fp4,
    load_high_nf4,
    load_low_bits,
    load_low_e2m1,
    load_low_fp4,
    load_low_nf4,
    load_u8,
    vsub,
)
from penstock.kernels.linear.cpu_row_of_codes import sum_codes

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]

_BLOCK_ROWS = 256
"""Rows of x that are multiplied by a tile of weights before it is converted again."""


@inner()
def _store_scaled(difference: Any, scales: Floats, group_at: int, out: Floats, at: int) -> None:
    store(out, at, vmul(difference, load_wide(scales, group_at)))


@inner()
def _load_table_values(kind: int, is_odd: bool, codes: Bytes, at: int) -> Any:
    """Load the values of E2M1, NF4 or FP4 codes: those of an odd input are in the upper bits."""
    if kind == E2M1:
        if is_odd:
            return load_high_e2m1(codes, at)
        return load_low_e2m1(codes, at)
    if kind == NF4:
        if is_odd:
            return load_high_nf4(codes, at)
        return load_low_nf4(codes, at)
    if is_odd:
        return load_high_fp4(codes, at)
    return load_low_fp4(codes, at)


@inner()
def _dequantize(
    kind: int, codes: Bytes, scales: Floats, zeros: Bytes, groups: Ints, num_groups: int,
    panel: int, begin: int, end: int, out: Floats,
) -> None:  # fmt: skip
    """Convert inputs [begin, end) of a panel to `out` [end - begin, PANEL]; `begin` is even."""
    num_inputs, groups_at = len(groups), panel * num_groups
    for k in range(begin, end):
        into, group = (k - begin) * PANEL, (groups_at + groups[k]) * PANEL
        if kind == INT4:
            at = (panel * (num_inputs // 2) + k // 2) * PANEL
            for c in range(0, PANEL, VECTOR_WIDTH):
                code = load_low_bits(codes, at + c)
                if k % 2:
                    code = load_high_bits(codes, at + c)
                zero = load_u8(zeros, group + c)
                _store_scaled(vsub(code, zero), scales, group + c, out, into + c)
        elif kind == INT8:
            at = (panel * num_inputs + k) * PANEL
            for c in range(0, PANEL, VECTOR_WIDTH):
                difference = vsub(load_u8(codes, at + c), load_u8(zeros, group + c))
                _store_scaled(difference, scales, group + c, out, into + c)
        elif kind != FP8:
            at = (panel * (num_inputs // 2) + k // 2) * PANEL
            for c in range(0, PANEL, VECTOR_WIDTH):
                value = _load_table_values(kind, k % 2 == 1, codes, at + c)
                _store_scaled(value, scales, group + c, out, into + c)
        else:
            at = (panel * num_inputs + k) * PANEL
            for c in range(0, PANEL, VECTOR_WIDTH):
                _store_scaled(load_e4m3(codes, at + c), scales, group + c, out, into + c)


@inner()
def _whole_panels(
    x: Floats, num_rows: int, kind: int, codes: Bytes, scales: Floats, zeros: Bytes, groups: Ints,
    bias: Floats, first: int, last: int, y: Floats, width: int,
) -> None:  # fmt: skip
    """Compute the columns of panels [first, last), stored from column 0 of y [num_rows, width]."""
    num_inputs, num_groups = len(groups), len(scales) // len(bias)
    bias = bias[first * PANEL :]
    out = np.empty(BLOCK_K * PANEL if num_rows > 1 else 1, np.float32)
    for floor in range(0, num_rows, _BLOCK_ROWS):
        top = min(floor + _BLOCK_ROWS, num_rows)
        for panel in range(first, last):
            column = (panel - first) * PANEL
            for begin in range(0, num_inputs, BLOCK_K):
                end = min(begin + BLOCK_K, num_inputs)
                before, step = (bias, 0) if begin == 0 else (y, width)
                if num_rows == 1:
                    sum_codes(
                        x, begin, end, kind, codes, scales, zeros, groups, num_groups, panel,
                        before, y, column,
                    )  # fmt: skip
                    continue
                _dequantize(
                    kind, codes, scales, zeros, groups, num_groups, panel, begin, end, out
                )  # fmt: skip
                for r in range(floor, top, TILE_ROWS):
                    tile(
                        x, r * num_inputs + begin, num_inputs, end - begin, out, 0, 0, 1, before,
                        r * step + column, step, y, r * width + column, width,
                    )  # fmt: skip


@inner()
def compute_columns(
    x: Floats, num_rows: int, kind: int, codes: Bytes, scales: Floats, zeros: Bytes, groups: Ints,
    bias: Floats, y: Floats, num_outputs: int, first: int, last: int,
) -> None:  # fmt: skip
    """Compute the columns of panels [first, last) of y [num_rows, num_outputs].

    If the last panel has fewer outputs than columns, its columns go through a temporary array.
    """
    whole = min(last, num_outputs // PANEL)
    if first < whole:
        _whole_panels(
            x, num_rows, kind, codes, scales, zeros, groups, bias, first, whole,
            y[first * PANEL :], num_outputs,
        )  # fmt: skip
    if max(first, whole) < last:
        spare = np.empty(num_rows * PANEL, np.float32)
        _whole_panels(
            x, num_rows, kind, codes, scales, zeros, groups, bias, last - 1, last, spare, PANEL
        )  # fmt: skip
        column = (last - 1) * PANEL
        for r in range(num_rows):
            for c in range(num_outputs - column):
                y[r * num_outputs + column + c] = spare[r * PANEL + c]


_SIGNATURE = (
    "void(float32[::1], int64, int64, uint8[::1], float32[::1], uint8[::1], int32[::1],"
    " float32[::1], float32[::1]"
)


@entry(_SIGNATURE + ")")
def _serial(
    x: Floats,  # [T * K]
    num_rows: int,  # 1, or a multiple of TILE_ROWS
    kind: int,
    codes: Bytes,  # [P, K, PANEL]; 4 bits: [P, K / 2, PANEL]
    scales: Floats,  # [P, G, PANEL]
    zeros: Bytes,  # [P, G, PANEL]; empty except for INT4 and INT8
    groups: Ints,  # [K]
    bias: Floats,  # [P * PANEL]
    y: Floats,  # [T * P * PANEL]
) -> None:
    """Compute y in one thread."""
    last = len(bias) // PANEL
    compute_columns(
        x, num_rows, kind, codes, scales, zeros, groups, bias, y, len(bias), 0, last
    )  # fmt: skip


@entry(_SIGNATURE + ", int64)", parallel=True)
def _parallel(
    x: Floats, num_rows: int, kind: int, codes: Bytes, scales: Floats, zeros: Bytes, groups: Ints,
    bias: Floats, y: Floats, num_threads: int,
) -> None:  # fmt: skip
    """Parallel version of `_serial`: threads split the panels."""
    num_panels = len(bias) // PANEL
    for thread in numba.prange(num_threads):
        first = num_panels * thread // num_threads
        last = num_panels * (thread + 1) // num_threads
        if first < last:
            compute_columns(
                x, num_rows, kind, codes, scales, zeros, groups, bias, y, len(bias), first, last
            )  # fmt: skip


def padded_rows(num_rows: int) -> int:
    """Return the number of rows of x that are read and of y that are written."""
    return num_rows if num_rows == 1 else -(-num_rows // TILE_ROWS) * TILE_ROWS


def load() -> None:
    """Compile the loops, or load them from the cache on disk."""
    load_entries(_serial, _parallel)


def run(*given: Any, num_threads: int) -> None:
    """Compute y with `num_threads` threads; `given` are the arguments of `_serial`."""
    run_serial_or_parallel(_serial, _parallel, *given, num_threads=num_threads)
