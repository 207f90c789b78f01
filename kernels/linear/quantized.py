"""Weight-only linear layers: y = x Wᵀ + b, with W stored as codes of 4 or 8 bits.

x is [T, K] and y [T, N]. W [N, K] is never stored as a float matrix. Each weight is a code with the
scale and the zero point of its group of inputs: with g(k) as the group of input k,
W[n, k] = (code[n, k] - zero[n, g(k)]) * scale[n, g(k)]. This representation, with G groups, covers
the published formats:

- FP8 (e4m3) codes, with one scale per tensor, per output or per block of inputs, without zeros;
- 8-bit integers, with one scale per output or per group;
- 4-bit integers, two per byte, as GPTQ, AWQ and compressed-tensors store them. With act-order, the
  groups are not ranges of inputs: g(k) is a table;
- 4-bit codes that index a table of 16 floats (`TABLES`), two per byte, without zeros: e2m1 (MXFP4
  and NVFP4), and NF4 and FP4 of bitsandbytes.

On a GPU, `triton_quantized` converts a tile of W to the dtype of x in the product's main loop; on a
CPU with AVX2, `cpu_dequantizing` converts it to float32. Elsewhere, W is converted by tiles of at
most `TILE_WEIGHTS` weights, then multiplied by torch. Activations are not quantized, unless
`pack_quantized` is told to: on CPUs, `cpu_packed_int4` multiplies INT8 activations by 4-bit codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.checks import FLOATS, check, check_contiguous
from penstock.kernels.cpu_common.cpu_features import has_avx2
from penstock.kernels.cpu_common.numba_runtime import configure_numba, has_numba
from penstock.kernels.fallback import record_fallback
from penstock.kernels.linear import code_kinds
from penstock.kernels.linear.code_tables import E2M1, FP4, NF4
from penstock.kernels.linear.cpu_packed_f32 import MIN_PARALLEL_MACS
from penstock.kernels.linear.cpu_packed_int4 import (
    PackedLinearInt4,
    has_int4_loops,
    pack_int4_panels,
    supported_group,
)
from penstock.kernels.linear.nan_codes import nan_codes
from penstock.kernels.linear.panels import padded_bias, to_panels
from penstock.kernels.linear.triton_quantized import TILE_INPUTS, quantized_matmul_triton
from penstock.kernels.triton_common.launch import runs_kernels, use_triton

Kind = Literal["int4", "int8", "fp8", "e2m1", "nf4", "fp4"]

TILE_WEIGHTS = 1 << 20
"""Maximum number of weights that are converted or compared at once, unless one row has more."""

KIND_NUMBERS: dict[Kind, int] = {
    "int4": code_kinds.INT4,
    "int8": code_kinds.INT8,
    "fp8": code_kinds.FP8,
    "e2m1": code_kinds.E2M1,
    "nf4": code_kinds.NF4,
    "fp4": code_kinds.FP4,
}
"""Number of each kind of codes in compiled kernels."""

TABLES: dict[Kind, tuple[float, ...]] = {"e2m1": E2M1, "nf4": NF4, "fp4": FP4}
"""Float32 values of the 16 codes, for the kinds whose 4-bit codes are indices in a table."""


def is_narrow(kind: Kind) -> bool:
    """Return whether codes have 4 bits and are stored two per byte."""
    return kind == "int4" or kind in TABLES


def has_zeros(kind: Kind) -> bool:
    """Return whether the weights of this kind have zero points."""
    return kind in ("int4", "int8")


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix [N, K] as codes, scales and zero points; `kind` gives the meaning of a code.

    Codes of "int4" and "int8" are unsigned. If a checkpoint has signed codes, 8 (int4) or 128
    (int8) is added to them, and is also their zero point. The other kinds have no zero points.
    """

    kind: Kind
    # [N, K] uint8. Codes of 4 bits are [N, K / 2]: inputs 2 i and 2 i + 1 are in bits 0-3 and 4-7.
    codes: Tensor
    scales: Tensor  # [N, G] float32
    zeros: Tensor  # [N, G] uint8 zero points; [N, 0] for a kind without zero points
    groups: Tensor  # [K] int32, the group of each input

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), len(self.groups)

    def dequantize(self, first: int = 0, last: int | None = None) -> Tensor:
        """Return rows [first, last) as float32.

        Each weight is its code, minus the zero point, times its scale, rounded to float32 once.
        """
        rows = slice(first, last)
        codes, groups = self.codes[rows], self.groups.long()
        scales = self.scales[rows][:, groups]
        if self.kind == "fp8":
            return codes.view(torch.float8_e4m3fn).to(torch.float32).mul_(scales)
        if is_narrow(self.kind):
            codes = torch.stack((codes & 15, codes >> 4), -1).view(len(codes), -1)
        if self.kind in TABLES:
            values = torch.tensor(TABLES[self.kind], dtype=torch.float32, device=codes.device)
            return values[codes.long()].mul_(scales)
        return codes.to(torch.float32).sub_(self.zeros[rows][:, groups]).mul_(scales)

    def take_rows(self, rows: Tensor) -> "QuantizedMatrix":
        """Return the matrix of the rows whose numbers are in `rows`, in the order of `rows`."""
        taken = self.codes[rows], self.scales[rows], self.zeros[rows]
        return QuantizedMatrix(self.kind, *taken, self.groups)

    def take_inputs(self, first: int, last: int) -> "QuantizedMatrix":
        """Return a matrix that consists of the inputs (columns) [first, last).

        For 4-bit codes, `last - first` must be even. Inputs keep the scales and zero points of
        their groups, even if the range begins or ends inside a group.
        """
        codes, groups = self.codes, self.groups[first:last]
        if not is_narrow(self.kind):
            codes = codes[:, first:last]
        elif first % 2:
            codes = torch.stack((codes & 15, codes >> 4), -1).view(len(codes), -1)[:, first:last]
            codes = codes[:, 0::2] | (codes[:, 1::2] << 4)
        else:
            codes = codes[:, first // 2 : last // 2]
        used, groups = torch.unique(groups, return_inverse=True)
        scales, zeros = self.scales[:, used], self.zeros
        return QuantizedMatrix(
            self.kind, codes.contiguous(), scales, zeros[:, used] if zeros.numel() else zeros,
            groups.to(torch.int32),
        )  # fmt: skip


def concatenate(matrices: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Concatenate the rows of matrices of one kind.

    Raises:
        ValueError: The matrices differ in kind or groups, for example because of act-order.
    """
    first = matrices[0]
    if len(matrices) == 1:
        return first
    for each in matrices[1:]:
        if each.kind != first.kind or not torch.equal(each.groups, first.groups):
            raise ValueError(
                "matrices with different groups of inputs or types of codes cannot be fused: "
                "quantize them in the same way"
            )
    codes, scales, zeros = (
        torch.cat([getattr(each, name) for each in matrices])
        for name in ("codes", "scales", "zeros")
    )
    return QuantizedMatrix(first.kind, codes, scales, zeros, first.groups)


def even_groups(num_inputs: int, size: int, device: torch.device) -> Tensor:
    """Return the group [K] int32 of each input, if each group is a range of `size` inputs."""
    return torch.arange(num_inputs, dtype=torch.int32, device=device) // size


@dataclass(frozen=True, slots=True)
class TiledLinear:
    """A weight-only linear layer computed by torch; W is dequantized some rows at a time."""

    matrix: QuantizedMatrix
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        record_fallback("quantized linear", x.device, f"{self.matrix.kind} weights")
        num_outputs, num_inputs = self.matrix.shape
        y = x.new_empty(len(x), num_outputs)
        count = max(1, TILE_WEIGHTS // num_inputs)
        for first in range(0, num_outputs, count):
            rows = slice(first, first + count)
            weight = self.matrix.dequantize(first, first + count).to(x.dtype)
            bias = None if self.bias is None else self.bias[rows]
            y[:, rows] = functional.linear(x, weight, bias)
        return y


def quantized_matmul(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    bias: Tensor | None = None,
    *,
    kind: Kind,
    one_group: bool = False,
) -> Tensor:
    """Return y = x Wᵀ + b [T, N], computed by the Triton kernel.

    Args:
        x: [T, K] float32, float16 or bfloat16 with contiguous rows, on a GPU.
        codes, scales, zeros, groups: the fields of `QuantizedMatrix`.
        bias: [N] of the dtype of x, or None.
        kind: kind of the codes.
        one_group: True if, for each tile of `TILE_INPUTS` inputs, all inputs are in one group.

    Raises:
        ValueError: a shape, dtype or stride is wrong, or x is on a CPU.
    """
    if not use_triton(x):
        raise ValueError(f"x is on {x.device}: expected a GPU")
    check("x", x, ("T", "K"), FLOATS)
    num_inputs, num_groups = x.shape[1], scales.shape[-1]
    check("groups", groups, (num_inputs,), (torch.int32,), like=x)
    width = num_inputs // 2 if is_narrow(kind) else num_inputs
    check("codes", codes, ("N", width), (torch.uint8,), like=x)
    check("scales", scales, (len(codes), "G"), (torch.float32,), like=x)
    counts = num_groups if has_zeros(kind) else 0
    check("zeros", zeros, (len(codes), counts), (torch.uint8,), like=x)
    for name, tensor in (("codes", codes), ("scales", scales), ("zeros", zeros)):
        check_contiguous(name, tensor)
    if bias is not None:
        check("bias", bias, (len(codes),), (x.dtype,), like=x)
    return quantized_matmul_triton(
        x, codes, scales, zeros, groups, bias, KIND_NUMBERS[kind], one_group
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TritonQuantizedLinear:
    """A weight-only linear layer computed by `quantized_matmul`."""

    matrix: QuantizedMatrix
    bias: Tensor | None
    one_group: bool

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        given = self.matrix
        return quantized_matmul(
            x, given.codes, given.scales, given.zeros, given.groups, self.bias,
            kind=given.kind, one_group=self.one_group,
        )  # fmt: skip


def _has_one_group_per_tile(groups: Tensor) -> bool:
    """Return whether, for each tile of the Triton kernel, all inputs are in one group."""
    tiles = groups[: len(groups) // TILE_INPUTS * TILE_INPUTS].view(-1, TILE_INPUTS)
    rest = groups[tiles.numel() :]
    return bool((tiles == tiles[:, :1]).all()) and bool((rest == rest[:1]).all())


@dataclass(frozen=True, slots=True)
class DequantizingLinear:
    """A weight-only linear layer for CPUs with AVX2.

    W is stored in P panels of C outputs (`panels.PANEL`). The layer is batch-invariant: the
    order of summation does not depend on the number of rows or threads.
    """

    kind: Kind
    codes: npt.NDArray[np.uint8] = field(repr=False)  # [P, U, C] units of `_units`, flattened
    scales: npt.NDArray[np.float32] = field(repr=False)  # [P, G, C], flattened; see `_scales`
    # [P, G, C] zero points, flattened; empty for a kind without zero points
    zeros: npt.NDArray[np.uint8] = field(repr=False)
    groups: npt.NDArray[np.int32] = field(repr=False)  # [2, K], flattened; see `_with_ends`
    bias: npt.NDArray[np.float32] = field(repr=False)  # [P * C]; 0 from index `num_outputs` on
    num_outputs: int

    @property
    def num_inputs(self) -> int:
        return len(self.groups) // 2

    def __call__(self, x: Tensor) -> Tensor:
        """Return x Wᵀ + b [T, N]. Raise ValueError if x is not [T, K] float32."""
        num_rows, num_inputs = len(x), self.num_inputs
        if x.dim() != 2 or x.shape[1] != num_inputs or x.dtype != torch.float32:
            found = f"shape {list(x.shape)} and dtype {x.dtype}"
            raise ValueError(f"x has {found}: expected [T, {num_inputs}] float32")
        y = torch.empty(num_rows, len(self.bias))
        work = num_rows * num_inputs * len(self.bias)
        _cpu_kernels().run(
            x.contiguous().view(-1).numpy(), num_rows, KIND_NUMBERS[self.kind], self.codes,
            self.scales, self.zeros, self.groups, self.bias, y.view(-1).numpy(),
            num_threads=1 if work < MIN_PARALLEL_MACS else torch.get_num_threads(),
        )  # fmt: skip
        return y[:, : self.num_outputs].contiguous()


def supports_dequantizing(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the CPU loops support activations of `dtype`, with any `QuantizedMatrix`."""
    if device.type != "cpu" or runs_kernels(device):
        return False
    return dtype == torch.float32 and has_avx2() and has_numba()


def has_weight_only_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a Triton kernel or CPU loops support `dtype`; if not, torch multiplies."""
    return runs_kernels(device) or supports_dequantizing(device, dtype)


def has_int4_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a kernel multiplies 4-bit weights by activations quantized from `dtype`."""
    return has_int4_loops() and supports_dequantizing(device, dtype)


def pack_quantized(
    matrix: QuantizedMatrix,
    bias: Tensor | None,
    dtype: torch.dtype,
    int8_activations: bool = False,
) -> TiledLinear | DequantizingLinear | PackedLinearInt4 | TritonQuantizedLinear:
    """Pack a linear layer for activations of `dtype`.

    On CPUs with AVX2, the result keeps no reference to `matrix`.

    Args:
        int8_activations: True to quantize activations to INT8, if the device has a kernel for
            `matrix` that does so.
    """
    if runs_kernels(matrix.codes.device) and matrix.codes.numel():
        return TritonQuantizedLinear(matrix, bias, _has_one_group_per_tile(matrix.groups))
    if not supports_dequantizing(matrix.codes.device, dtype) or not matrix.codes.numel():
        return TiledLinear(matrix, bias)
    group = _integer_group(matrix) if int8_activations else None
    if group is not None:
        return pack_int4_panels(matrix.codes, matrix.scales, matrix.zeros, group, bias)
    num_outputs = len(matrix.codes)
    return DequantizingLinear(
        matrix.kind, to_panels(_units(matrix)).view(np.uint8), to_panels(_scales(matrix)),
        to_panels(matrix.zeros), _with_ends(matrix.groups), padded_bias(bias, num_outputs),
        num_outputs,
    )  # fmt: skip


def _integer_group(matrix: QuantizedMatrix) -> int | None:
    """Return the number of inputs per group for `pack_int4_panels`.

    Return None if that function does not support the matrix. It does not support act-order, where a
    group is not a range of successive inputs.
    """
    if matrix.kind != "int4" or not has_int4_loops():
        return None
    num_inputs, num_groups = len(matrix.groups), matrix.scales.shape[1]
    size = int((matrix.groups == 0).sum())
    if not size or -(-num_inputs // size) != num_groups:
        return None
    if not torch.equal(matrix.groups, even_groups(num_inputs, size, matrix.groups.device)):
        return None
    return supported_group(num_inputs, size)


def _units(matrix: QuantizedMatrix) -> Tensor:
    """Return the codes as U units per row, [N, U].

    A unit is an integer that contains the codes of successive inputs. It has 2 bytes for FP8, and
    4 bytes for other kinds. Rows are padded to a multiple of 4 bytes.
    """
    codes = functional.pad(matrix.codes, (0, -matrix.codes.shape[1] % 4))
    return codes.contiguous().view(torch.int16 if matrix.kind == "fp8" else torch.int32)


def _scales(matrix: QuantizedMatrix) -> Tensor:
    """Return the scales for the compiled loops.

    For FP8, the scales are multiplied by 2^8, because the loops divide the values of FP8 codes by
    2^8. The loops cannot convert an FP8 code of NaN. The scale of its group becomes NaN instead.
    The result is the same, because an output with a NaN weight is NaN.
    """
    if matrix.kind != "fp8":
        return matrix.scales
    scales = matrix.scales * 2.0**8
    num_outputs, num_inputs = matrix.shape
    count = max(1, TILE_WEIGHTS // num_inputs)  # bounds the memory for the comparison
    for first in range(0, num_outputs, count):
        outputs, inputs = nan_codes(matrix.codes[first : first + count])
        scales[first + outputs, matrix.groups[inputs].long()] = torch.nan
    return scales


def _with_ends(groups: Tensor) -> npt.NDArray[np.int32]:
    """Return [2, K], flattened: each input's group, then the end of its run of equal groups."""
    _, lengths = torch.unique_consecutive(groups, return_counts=True)
    ends = lengths.cumsum(0).repeat_interleave(lengths)
    return torch.cat((groups, ends.to(torch.int32))).numpy()


def load_cpu_kernels() -> None:
    """Load the compiled loops, compiling them if they are not in the cache on disk."""
    _cpu_kernels().load()


@cache
def _cpu_kernels() -> Any:
    configure_numba()
    from penstock.kernels.linear import cpu_dequantizing

    return cpu_dequantizing
