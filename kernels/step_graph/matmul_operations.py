"""Operations of a CPU step graph that multiply matrices or quantize their inputs."""

from dataclasses import dataclass

from penstock.kernels.linear.cpu_packed_f32 import PackedLinearF32
from penstock.kernels.linear.cpu_packed_int4 import PackedLinearInt4
from penstock.kernels.linear.cpu_packed_int8 import PackedLinearInt8
from penstock.kernels.linear.quantized import KIND_NUMBERS, DequantizingLinear
from penstock.kernels.step_graph import opcodes as codes
from penstock.kernels.step_graph.layout import Buffer
from penstock.kernels.step_graph.operations import Operation, input_columns, output_columns


@dataclass(frozen=True, slots=True, eq=False)
class MatmulF32(Operation):
    """`out = x Wᵀ + b` with packed float32 weights."""

    opcode = codes.MATMUL_F32

    x: Buffer
    linear: PackedLinearF32
    out: Buffer

    def columns(self) -> dict[int, int]:
        return {
            **input_columns(self.x),
            **output_columns(self.out),
            codes.WEIGHT: self.linear.panels.ctypes.data,
            codes.WEIGHT_SIZE: len(self.linear.panels),
            codes.BIAS: self.linear.bias.ctypes.data,
            codes.BIAS_SIZE: len(self.linear.bias),
            codes.BATCH_INVARIANT: int(self.linear.batch_invariant),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Quantize(Operation):
    """`qvalues, row_scales = x quantized to INT8`; an element of `qvalues` contains four values."""

    opcode = codes.QUANTIZE

    x: Buffer
    qvalues: Buffer
    row_scales: Buffer
    limit: float  # see `linear.quantize_rows.quantize_per_token`

    def columns(self) -> dict[int, int]:
        return {
            **input_columns(self.x),
            codes.OUT: self.qvalues.at,
            codes.ROW_SCALES: self.row_scales.at,
        }

    def floats(self) -> dict[int, float]:
        return {codes.LIMIT: self.limit}


@dataclass(frozen=True, slots=True, eq=False)
class MatmulInt8(Operation):
    """`out = x Wᵀ + b` with packed INT8 weights, where x was quantized by `Quantize`."""

    opcode = codes.MATMUL_INT8

    qvalues: Buffer
    row_scales: Buffer
    linear: PackedLinearInt8
    out: Buffer

    def columns(self) -> dict[int, int]:
        return {
            codes.X: self.qvalues.at,
            codes.X_WIDTH: self.linear.num_inputs,
            **output_columns(self.out),
            codes.WEIGHT: self.linear.tiles.ctypes.data,
            codes.WEIGHT_SIZE: len(self.linear.tiles),
            codes.BIAS: self.linear.bias.ctypes.data,
            codes.ROW_SCALES: self.row_scales.at,
            codes.WEIGHT_SCALES: self.linear.scales.ctypes.data,
            codes.ZERO_POINT_CORRECTION: self.linear.shifts.ctypes.data,
        }


@dataclass(frozen=True, slots=True, eq=False)
class MatmulQuantized(Operation):
    """`out = x Wᵀ + b`, where W is stored as codes of 4 or 8 bits and x is float32."""

    opcode = codes.MATMUL_QUANTIZED

    x: Buffer
    linear: DequantizingLinear
    out: Buffer

    def columns(self) -> dict[int, int]:
        linear = self.linear
        return {
            **input_columns(self.x),
            **output_columns(self.out),
            codes.WEIGHT: linear.codes.ctypes.data,
            codes.WEIGHT_SIZE: len(linear.codes),
            codes.BIAS: linear.bias.ctypes.data,
            codes.BIAS_SIZE: len(linear.bias),
            codes.CODE_KIND: KIND_NUMBERS[linear.kind],
            codes.CODE_SCALES: linear.scales.ctypes.data,
            codes.SCALES_SIZE: len(linear.scales),
            codes.ZEROS: linear.zeros.ctypes.data,
            codes.ZEROS_SIZE: len(linear.zeros),
            codes.GROUPS: linear.groups.ctypes.data,
        }


@dataclass(frozen=True, slots=True, eq=False)
class QuantizeBlocks(Operation):
    """`qvalues, row_scales, offsets = x quantized by blocks`, see `linear/quantize_blocks`."""

    opcode = codes.QUANTIZE_BLOCKS

    x: Buffer
    qvalues: Buffer  # each float32 element contains four 8-bit values
    row_scales: Buffer
    offsets: Buffer
    run: int

    def columns(self) -> dict[int, int]:
        return {
            **input_columns(self.x),
            codes.OUT: self.qvalues.at,
            codes.ROW_SCALES: self.row_scales.at,
            codes.OFFSETS: self.offsets.at,
            codes.RUN: self.run,
        }


@dataclass(frozen=True, slots=True, eq=False)
class MatmulInt4(Operation):
    """`out = x Wᵀ + b` with packed 4-bit weights, where x was quantized by `QuantizeBlocks`."""

    opcode = codes.MATMUL_INT4

    quantized: QuantizeBlocks
    linear: PackedLinearInt4
    out: Buffer

    def columns(self) -> dict[int, int]:
        linear = self.linear
        return {
            codes.X: self.quantized.qvalues.at,
            codes.X_WIDTH: linear.num_inputs,
            **output_columns(self.out),
            codes.WEIGHT: linear.codes.ctypes.data,
            codes.WEIGHT_SIZE: len(linear.codes),
            codes.BIAS: linear.bias.ctypes.data,
            codes.BIAS_SIZE: len(linear.bias),
            codes.ROW_SCALES: self.quantized.row_scales.at,
            codes.CODE_SCALES: linear.scales.ctypes.data,
            codes.SCALES_SIZE: len(linear.scales),
            codes.ZEROS: linear.zeros.ctypes.data,
            codes.ZEROS_SIZE: len(linear.zeros),
            codes.OFFSETS: self.quantized.offsets.at,
            codes.RUN: linear.run,
            codes.GROUP_INPUTS: linear.group_inputs,
        }
