"""Matrix products of the interpreter of CPU step graphs."""

# mypy: disable-error-code="no-untyped-call, no-untyped-def"

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.kernels.cpu_common.late_codegen import inner
from penstock.kernels.cpu_common.partition import f32_array as _floats
from penstock.kernels.cpu_common.partition import i32_array as _ints
from penstock.kernels.cpu_common.partition import partition as _partition
from penstock.kernels.cpu_common.partition import u8_array as _bytes
from penstock.kernels.cpu_common.simd import prefetch
from penstock.kernels.linear import cpu_dequantizing, cpu_f32_simd
from penstock.kernels.linear.cpu_f32_simd import TILE_ROWS
from penstock.kernels.linear.cpu_packed_f32 import MIN_AMX_ROWS, has_amx
from penstock.kernels.linear.cpu_packed_int4 import has_int4_loops
from penstock.kernels.linear.cpu_packed_int8 import has_int8_loops
from penstock.kernels.linear.cpu_quantize_blocks import quantize_blocks
from penstock.kernels.linear.cpu_quantize_rows import quantize_rows
from penstock.kernels.linear.int8_blocks import BLOCK_INPUTS
from penstock.kernels.linear.panels import PANEL
from penstock.kernels.step_graph.opcodes import (
    ALIGNMENT,
    BATCH_INVARIANT,
    BIAS,
    BIAS_SIZE,
    CODE_KIND,
    CODE_SCALES,
    GROUP_INPUTS,
    GROUPS,
    MATMUL_INT4,
    MATMUL_INT8,
    MATMUL_QUANTIZED,
    OFFSETS,
    OPCODE,
    OUT,
    OUT_WIDTH,
    ROW_SCALES,
    RUN,
    SCALES_SIZE,
    WEIGHT,
    WEIGHT_SCALES,
    WEIGHT_SIZE,
    X_WIDTH,
    ZERO_POINT_CORRECTION,
    ZEROS,
    ZEROS_SIZE,
    X,
)

_f32_simd_columns: Any = cpu_f32_simd.compute_columns
_f32_amx_columns: Any = (
    cpu_f32_simd.compute_columns
)  # placeholder: called only if an import below replaces it
_int8_columns: Any = cpu_f32_simd.compute_columns
_int4_columns: Any = cpu_f32_simd.compute_columns

HAS_AMX, HAS_INT8_LOOPS, HAS_INT4_LOOPS = has_amx(), has_int8_loops(), has_int4_loops()
if HAS_AMX:
    from penstock.kernels.linear.cpu_f32_amx_bf16x6 import compute_columns as _f32_amx_columns
    from penstock.kernels.linear.cpu_int8_amx import compute_columns as _int8_columns
elif HAS_INT8_LOOPS:
    from penstock.kernels.linear.cpu_int8_simd import compute_columns as _int8_columns
if HAS_INT4_LOOPS:
    from penstock.kernels.linear.cpu_int4_simd import compute_columns as _int4_columns

Floats = npt.NDArray[np.float32]
Longs = npt.NDArray[np.int64]

_LINE = 16  # number of float32 in a cache line


@inner()
def linear(
    op: Longs, arena: Floats, first_row: int, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute opcode MATMUL_F32, see `matmul_operations.MatmulF32`."""
    num_inputs, num_outputs = op[X_WIDTH], op[OUT_WIDTH]
    x, y = arena[op[X] + first_row * num_inputs :], arena[op[OUT] + first_row * num_outputs :]
    panels, bias = _floats(op[WEIGHT], op[WEIGHT_SIZE]), _floats(op[BIAS], op[BIAS_SIZE])
    if HAS_AMX and (op[BATCH_INVARIANT] or num_rows >= MIN_AMX_ROWS):
        first, last = _partition(num_outputs // ALIGNMENT, me, count)
        if first < last:
            _f32_amx_columns(
                x, num_rows, num_inputs, panels, bias, y, num_outputs, num_outputs // 16,
                first * ALIGNMENT // 16, last * ALIGNMENT // 16,
            )  # fmt: skip
        return
    rows = num_rows if num_rows == 1 else -(-num_rows // TILE_ROWS) * TILE_ROWS
    first, last = _partition(-(-num_outputs // PANEL), me, count)
    _f32_simd_columns(x, rows, num_inputs, panels, bias, y, num_outputs, first, last)


@inner()
def quantize(
    op: Longs, limit: float, arena: Floats, first_row: int, num_rows: int, me: int, count: int
) -> None:
    """Execute opcode QUANTIZE, see `matmul_operations.Quantize`."""
    width = op[X_WIDTH]
    x = arena[op[X] + first_row * width :][: num_rows * width].reshape(num_rows, width)
    bytes_at = first_row * width
    qvalues = arena[op[OUT] :].view(np.uint8)[bytes_at:][: num_rows * width]
    row_scales = arena[op[ROW_SCALES] + first_row :][:num_rows]
    first, last = _partition(num_rows, me, count)
    quantize_rows(x, qvalues.reshape(num_rows, width), row_scales, limit, first, last)


@inner()
def int8_linear(
    op: Longs, arena: Floats, first_row: int, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute opcode MATMUL_INT8, see `matmul_operations.MatmulInt8`."""
    num_inputs, num_outputs = op[X_WIDTH], op[OUT_WIDTH]
    qvalues = arena[op[X] :].view(np.uint8)[first_row * num_inputs :]
    y, row_scales = arena[op[OUT] + first_row * num_outputs :], arena[op[ROW_SCALES] + first_row :]
    weights = _bytes(op[WEIGHT], op[WEIGHT_SIZE])
    correction = _ints(op[ZERO_POINT_CORRECTION], num_outputs)
    scales, bias = _floats(op[WEIGHT_SCALES], num_outputs), _floats(op[BIAS], num_outputs)
    first, last = _partition(num_outputs // ALIGNMENT, me, count)
    if HAS_INT8_LOOPS and first < last:
        _int8_columns(
            qvalues, num_rows, num_inputs, weights, correction, row_scales, scales, bias, y,
            num_outputs, first, last,
        )  # fmt: skip


@inner()
def quantized_linear(
    op: Longs, arena: Floats, first_row: int, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute opcode MATMUL_QUANTIZED, see `matmul_operations.MatmulQuantized`."""
    num_inputs, num_outputs = op[X_WIDTH], op[OUT_WIDTH]
    x, y = arena[op[X] + first_row * num_inputs :], arena[op[OUT] + first_row * num_outputs :]
    first, last = _partition(-(-num_outputs // PANEL), me, count)
    if first < last:
        cpu_dequantizing.compute_columns(
            x, num_rows, op[CODE_KIND], _bytes(op[WEIGHT], op[WEIGHT_SIZE]),
            _floats(op[CODE_SCALES], op[SCALES_SIZE]), _bytes(op[ZEROS], op[ZEROS_SIZE]),
            _ints(op[GROUPS], 2 * num_inputs), _floats(op[BIAS], op[BIAS_SIZE]), y, num_outputs,
            first, last,
        )  # fmt: skip


@inner()
def quantize_by_block(
    op: Longs, arena: Floats, first_row: int, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute opcode QUANTIZE_BLOCKS, see `matmul_operations.QuantizeBlocks`."""
    width, run = op[X_WIDTH], op[RUN]
    qvalues, row_scales, offsets = _quantized_rows(op, op[OUT], arena, first_row)
    first, last = _partition(num_rows, me, count)
    quantize_blocks(
        arena[op[X] + first_row * width :], qvalues, row_scales, offsets, width, run, first, last
    )


@inner()
def _quantized_rows(op: Longs, qvalues_at: int, arena: Floats, first_row: int) -> Any:
    """Return the quantized values, block scales and run offsets of the rows from `first_row` on."""
    width = op[X_WIDTH]
    num_blocks, num_runs = -(-width // BLOCK_INPUTS), -(-width // op[RUN])
    return (
        arena[qvalues_at:].view(np.int8)[first_row * width :],
        arena[op[ROW_SCALES] + first_row * num_blocks :],
        arena[op[OFFSETS] + first_row * num_runs :].view(np.int32),
    )


@inner()
def int4_linear(
    op: Longs, arena: Floats, first_row: int, num_rows: int, me: int, count: int
) -> None:  # fmt: skip
    """Execute opcode MATMUL_INT4, see `matmul_operations.MatmulInt4`."""
    num_inputs, num_outputs = op[X_WIDTH], op[OUT_WIDTH]
    first, last = _partition(-(-num_outputs // PANEL), me, count)
    if HAS_INT4_LOOPS and first < last:
        qvalues, row_scales, offsets = _quantized_rows(op, op[X], arena, first_row)
        _int4_columns(
            qvalues, row_scales, offsets, num_rows, num_inputs, op[RUN], op[GROUP_INPUTS],
            _bytes(op[WEIGHT], op[WEIGHT_SIZE]), _floats(op[CODE_SCALES], op[SCALES_SIZE]),
            _bytes(op[ZEROS], op[ZEROS_SIZE]), _floats(op[BIAS], op[BIAS_SIZE]),
            arena[op[OUT] + first_row * num_outputs :], num_outputs, first, last,
        )  # fmt: skip


@inner()
def prefetch_weights(op: Longs, num_prefetched: int, me: int, count: int) -> int:
    """Prefetch the next cache line of this thread's weights.

    `num_prefetched` lines are already prefetched. The result is `num_prefetched` + 1.
    """
    num_inputs, num_outputs = op[X_WIDTH], op[OUT_WIDTH]
    if op[OPCODE] == MATMUL_INT8:
        first, last = _partition(num_outputs // ALIGNMENT, me, count)
        # The strips of a block are read at the same time, so their lines are prefetched in turn.
        block, line = first + num_prefetched // num_inputs, num_prefetched % num_inputs
        at = (block * ALIGNMENT + line % 4 * 16) * num_inputs + line // 4 * 64
        if block < last:
            prefetch(_bytes(op[WEIGHT], op[WEIGHT_SIZE]), at)
        return num_prefetched + 1
    first, last = _partition(-(-num_outputs // PANEL), me, count)
    if op[OPCODE] in (MATMUL_QUANTIZED, MATMUL_INT4):
        size = op[WEIGHT_SIZE] // (op[BIAS_SIZE] // PANEL)  # size of a panel in bytes
        at = first * size + num_prefetched * 64
        if at < last * size:
            prefetch(_bytes(op[WEIGHT], op[WEIGHT_SIZE]), at)
        return num_prefetched + 1
    at = first * num_inputs * PANEL + num_prefetched * _LINE
    if at < last * num_inputs * PANEL:
        prefetch(_floats(op[WEIGHT], op[WEIGHT_SIZE]), at)
    return num_prefetched + 1
