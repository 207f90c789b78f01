"""AVX-512 loops of `quantized` for a single row of x.

Weights are converted in registers and multiplied at once, so that memory is read once. Conversions
and multiplications are those of `cpu_dequantizing` and `cpu_f32_avx512.sum_chunk` in the same
order, so the results are bitwise equal.
"""

# mypy: disable-error-code="no-untyped-call"

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.simd import (
    VECTOR_WIDTH,
    broadcast_load,
    fma,
    load_wide,
    splat_wide,
    store,
    vadd,
    vmul,
)
from penstock.kernels.linear.code_kinds import E2M1, FP8, INT4, INT8, NF4
from penstock.kernels.linear.cpu_f32_avx512 import PANEL
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

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int32]

_SECOND, _THIRD = VECTOR_WIDTH, 2 * VECTOR_WIDTH


@inner()
def _load_scales(scales: Floats, at: int) -> Any:
    return (
        load_wide(scales, at),
        load_wide(scales, at + _SECOND),
        load_wide(scales, at + _THIRD),
    )


@inner()
def _load_bytes(codes: Bytes, at: int) -> Any:
    return load_u8(codes, at), load_u8(codes, at + _SECOND), load_u8(codes, at + _THIRD)


@inner()
def _fma_values(sums: Any, x: Any, values: Any, scales: Any) -> Any:
    """Return sums + x * (values * scales); the product of value and scale is rounded."""
    a, b, c = sums
    p, q, r = values
    s, t, u = scales
    return fma(x, vmul(p, s), a), fma(x, vmul(q, t), b), fma(x, vmul(r, u), c)


@inner()
def _fma_codes(sums: Any, x: Any, codes: Any, zeros: Any, scales: Any) -> Any:
    """Return sums + x * ((codes - zeros) * scales)."""
    p, q, r = codes
    i, j, k = zeros
    return _fma_values(sums, x, (vsub(p, i), vsub(q, j), vsub(r, k)), scales)


@inner()
def _low(codes: Bytes, at: int) -> Any:
    return (
        load_low_bits(codes, at),
        load_low_bits(codes, at + _SECOND),
        load_low_bits(codes, at + _THIRD),
    )


@inner()
def _high(codes: Bytes, at: int) -> Any:
    return (
        load_high_bits(codes, at),
        load_high_bits(codes, at + _SECOND),
        load_high_bits(codes, at + _THIRD),
    )


@inner()
def _e4m3(codes: Bytes, at: int) -> Any:
    return load_e4m3(codes, at), load_e4m3(codes, at + _SECOND), load_e4m3(codes, at + _THIRD)


@inner()
def _low_table(kind: int, codes: Bytes, at: int) -> Any:
    if kind == E2M1:
        return load_low_e2m1(codes, at)
    if kind == NF4:
        return load_low_nf4(codes, at)
    return load_low_fp4(codes, at)


@inner()
def _high_table(kind: int, codes: Bytes, at: int) -> Any:
    if kind == E2M1:
        return load_high_e2m1(codes, at)
    if kind == NF4:
        return load_high_nf4(codes, at)
    return load_high_fp4(codes, at)


@inner()
def _table(kind: int, is_odd: bool, codes: Bytes, at: int) -> Any:
    if is_odd:
        return (
            _high_table(kind, codes, at),
            _high_table(kind, codes, at + _SECOND),
            _high_table(kind, codes, at + _THIRD),
        )
    return (
        _low_table(kind, codes, at),
        _low_table(kind, codes, at + _SECOND),
        _low_table(kind, codes, at + _THIRD),
    )


@inner()
def _sum_int4(
    x: Floats, k: int, stop: int, codes: Bytes, at: int, scales: Any, zeros: Any, sums: Any
) -> Any:
    """Add inputs [k, stop) of one group; the codes of inputs 2 i and 2 i + 1 are in row i."""
    if k % 2 and k < stop:
        high = _high(codes, at + k // 2 * PANEL)
        sums = _fma_codes(sums, broadcast_load(x, k), high, zeros, scales)
        k += 1
    for pair in range(k // 2, stop // 2):
        low, high = _low(codes, at + pair * PANEL), _high(codes, at + pair * PANEL)
        sums = _fma_codes(sums, broadcast_load(x, 2 * pair), low, zeros, scales)
        sums = _fma_codes(sums, broadcast_load(x, 2 * pair + 1), high, zeros, scales)
    if stop % 2 and k < stop:
        low = _low(codes, at + stop // 2 * PANEL)
        sums = _fma_codes(sums, broadcast_load(x, stop - 1), low, zeros, scales)
    return sums


@inner()
def _end_of_group(groups: Ints, k: int, end: int) -> int:
    """Return the end of the run of inputs from `k` on that are in one group."""
    stop = k + 1
    while stop < end and groups[stop] == groups[k]:
        stop += 1
    return stop


@inner()
def sum_codes(
    x: Floats, begin: int, end: int, kind: int, codes: Bytes, scales: Floats, zeros: Bytes,
    groups: Ints, num_groups: int, panel: int, before: Floats, y: Floats, column: int,
) -> None:  # fmt: skip
    """Multiply inputs [begin, end) of one row by a panel; store `before` + sums to y."""
    none = splat_wide(np.float32(0))
    sums = (none, none, none)
    num_inputs = len(groups)
    wide, narrow = panel * num_inputs * PANEL, panel * (num_inputs // 2) * PANEL
    k = begin
    while k < end:
        stop = _end_of_group(groups, k, end)
        group = (panel * num_groups + groups[k]) * PANEL
        factors = _load_scales(scales, group)
        if kind == INT4:
            sums = _sum_int4(
                x, k, stop, codes, narrow, factors, _load_bytes(zeros, group), sums
            )  # fmt: skip
        elif kind == INT8:
            offsets = _load_bytes(zeros, group)
            for i in range(k, stop):
                levels = _load_bytes(codes, wide + i * PANEL)
                sums = _fma_codes(sums, broadcast_load(x, i), levels, offsets, factors)
        elif kind == FP8:
            for i in range(k, stop):
                values = _e4m3(codes, wide + i * PANEL)
                sums = _fma_values(sums, broadcast_load(x, i), values, factors)
        else:
            for i in range(k, stop):
                values = _table(kind, i % 2 == 1, codes, narrow + i // 2 * PANEL)
                sums = _fma_values(sums, broadcast_load(x, i), values, factors)
        k = stop
    a, b, c = sums
    store(y, column, vadd(load_wide(before, column), a))
    store(y, column + _SECOND, vadd(load_wide(before, column + _SECOND), b))
    store(y, column + _THIRD, vadd(load_wide(before, column + _THIRD), c))
