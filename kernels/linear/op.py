"""Linear layers with packed weights: y = x Wᵀ + b with x [T, K], W [N, K] and y [T, N].

When a model is loaded, its weights are rearranged once into one of these CPU formats:

- float32 panels (`cpu_packed_f32`), on CPUs with AVX2;
- float32 in oneDNN's blocked layout, on other CPUs: up to twice as fast as unpacked weights for 2
  to 32 rows, and equally fast for more rows. In all measurements so far (docs/performance.md), the
  order of summation did not depend on the number of rows or threads. oneDNN does not guarantee
  this, so `pack_batch_invariant` tests it, and pads the rows if the test fails;
- INT8, with one scale s_w per weight row: y = s_x s_w (x / s_x)₈ (W / s_w)₈ᵀ, where ()₈ rounds to
  8 bits. The scale s_x of an activation row is computed at run time, or it is static. The int32
  sums are exact, so the result for a row does not depend on other rows. CPUs with AMX, AVX-512 VNNI
  or AVX2 use `cpu_packed_int8` if K is a multiple of its tile size. Otherwise, oneDNN computes the
  layer on CPUs with VNNI, and FBGEMM on other CPUs. With FBGEMM, activations are quantized to 7
  bits, because FBGEMM's products of 8 by 8 bits saturate.

On a GPU, this module offers only `pack_batch_invariant` (see `batch_invariant`).
"""

import platform
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.checks import FLOATS
from penstock.kernels.linear.batch_invariant import BatchInvariantLinear
from penstock.kernels.linear.cpu_packed_f32 import pack_f32, supports_packed_f32
from penstock.kernels.linear.cpu_packed_int8 import pack_int8_tiles, supports_int8_tiles
from penstock.kernels.linear.quantize_rows import QMAX, ZERO_POINT, quantize_per_token
from penstock.kernels.linear.quantize_weights import quantize_weight
from penstock.kernels.linear.quantized import QuantizedMatrix
from penstock.kernels.triton_common.launch import runs_kernels


class PackedLinear(Protocol):
    """A linear layer with packed weights. A call maps x [T, K] to y [T, N]."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class OneDnnLinear:
    """A float32 linear layer computed by oneDNN.

    For a single row of x, unpacked weights are used if available, because they are faster.
    """

    # [N, K] unpacked weights for a single row of x; if None, `blocked` is used for any row count
    weight: Tensor | None
    blocked: Tensor  # the weights in oneDNN's opaque layout
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1 and self.weight is not None:
            return functional.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "none", [], "")
        return y


def pack_onednn(weight: Tensor, bias: Tensor | None) -> OneDnnLinear:
    """Pack `weight` [N, K] for oneDNN; `supports_onednn` must be true for this weight."""
    return OneDnnLinear(weight, _reorder(weight), bias)


@dataclass(frozen=True, slots=True)
class PaddedLinear:
    """Runs `product` on blocks of exactly `rows` rows; the last block is padded.

    With a fixed number of rows, a library always chooses the same code, so the result for a row
    does not depend on the number of rows.
    """

    product: PackedLinear
    rows: int = 16

    def __call__(self, x: Tensor) -> Tensor:
        filled = functional.pad(x, (0, 0, 0, -len(x) % self.rows))
        outputs = [self.product(block) for block in torch.split(filled, self.rows)]
        return torch.cat(outputs)[: len(x)]


def pack_batch_invariant(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Pack a batch-invariant linear layer: a row of y does not depend on the other rows of x.

    Args:
        weight: [N, K]. Check `batch_invariant_unsupported_reason` for its device and dtype first.
            On a CPU, any strides are allowed, and the result keeps no reference to `weight`.
        bias: [N] or None.
    """
    if runs_kernels(weight.device):
        return BatchInvariantLinear(weight, bias)
    if supports_packed_f32(weight):
        return pack_f32(weight, bias, batch_invariant=True)
    product = OneDnnLinear(None, _reorder(weight.contiguous()), bias)
    key = (*weight.shape, torch.get_num_threads())
    if key not in _fixed_by_itself:
        _fixed_by_itself[key] = _is_batch_invariant(product, weight.shape[1])
    return product if _fixed_by_itself[key] else PaddedLinear(product)


_fixed_by_itself: dict[tuple[int, ...], bool] = {}
"""Stored results of `_is_batch_invariant` for oneDNN layers, by (N, K, number of threads)."""


def _is_batch_invariant(product: PackedLinear, num_inputs: int) -> bool:
    x = torch.randn(160, num_inputs, generator=torch.Generator().manual_seed(0))
    whole = product(x)
    ranges = ((at, at + rows) for at, rows in ((0, 1), (9, 2), (3, 3), (5, 7), (1, 17), (30, 64)))
    return all(torch.equal(product(x[at:end]), whole[at:end]) for at, end in ranges)


def batch_invariant_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason why `pack_batch_invariant` is not supported, or "" if it is supported."""
    if runs_kernels(device):
        return "" if dtype in FLOATS else f"a GPU needs float32, float16 or bfloat16, not {dtype}"
    if device.type != "cpu":
        return f"only CPUs and CUDA GPUs support it, not {device.type}"
    if dtype != torch.float32:
        return f"a CPU needs float32, not {str(dtype).removeprefix('torch.')}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return f"this torch build has no oneDNN for {platform.machine()}"
    return ""


def _reorder(weight: Tensor) -> Tensor:
    rows_hint = 64
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows_hint)
    return blocked


def supports_onednn(weight: Tensor) -> bool:
    """Return whether `pack_onednn` supports these weights."""
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
    )


def int8_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str:
    """Return the reason why `pack_int8` is not supported, or "" if it is supported.

    On a GPU, `w8a8` has INT8 products.
    """
    if device.type != "cpu":
        return f"packed INT8 linear layers run on CPUs only, not on {device.type}"
    if dtype != torch.float32:
        return f"INT8 linear layers need float32, not {str(dtype).removeprefix('torch.')}"
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return (
            f"this torch build has no FBGEMM (INT8 matrix multiplication) for {platform.machine()}"
        )
    return ""


@dataclass(frozen=True, slots=True)
class OneDnnInt8Linear:
    """An INT8 linear layer computed by oneDNN; activations are quantized per row at run time."""

    packed: Tensor  # weights in oneDNN's opaque layout
    scales: Tensor  # [N] float32 scales of the weights
    zeros: Tensor  # [N] int32 zero points of the weights: all 0
    bias: Tensor | None
    input_limit: float  # `limit` of `quantize_per_token`

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, len(self.scales))
        qvalues, factors = quantize_per_token(x, self.input_limit)
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            qvalues, 1.0, ZERO_POINT, self.packed, self.scales, self.zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        y.mul_(factors)
        return y if self.bias is None else y.add_(self.bias)


@dataclass(frozen=True, slots=True)
class FbgemmInt8Linear:
    """An INT8 linear layer computed by FBGEMM.

    Each row of x is scaled to [-1, 1] and then quantized uniformly.
    """

    packed: Any  # weights in FBGEMM's opaque layout
    bias: Tensor | None
    steps: int  # largest magnitude of a quantized activation
    input_limit: float  # `limit` of `quantize_per_token`

    def __call__(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(x.dtype).tiny)
        if self.input_limit:
            largest = torch.where(largest.isfinite(), self.input_limit, largest)
            x = x.clamp(-self.input_limit, self.input_limit)
        y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / largest, 1 / self.steps, self.steps + 1, self.packed
        )
        y.mul_(largest)
        return y if self.bias is None else y.add_(self.bias)


def pack_int8(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Quantize and pack `weight` [N, K] float32; the result keeps no reference to `weight`."""
    return pack_int8_matrix(quantize_weight(weight, "int8"), bias)


def pack_int8_codes(
    qweight: Tensor, scales: Tensor, bias: Tensor | None, input_limit: float = 0.0
) -> PackedLinear:
    """Pack weights that are already quantized; activations are quantized at run time.

    Args:
        qweight: [N, K] int8.
        scales: [N] float32; the value of a weight is its code times the scale of its row.
        bias: [N] float32 or None.
        input_limit: largest magnitude of an activation with a static scale, 127 times this scale.
            0: each row gets its own scale, see `quantize_rows`.
    """
    if supports_int8_tiles(qweight):
        return pack_int8_tiles(qweight, scales, bias, input_limit)
    if _has_vnni():
        packed = torch.ops.onednn.qlinear_prepack(qweight, None)
        zeros = torch.zeros(len(qweight), dtype=torch.int32)
        return OneDnnInt8Linear(packed, scales, zeros, bias, input_limit)
    zeros = torch.zeros(len(qweight), dtype=torch.int64)
    with warnings.catch_warnings():
        # torch has deprecated quantized tensors, and warns. FBGEMM packs no other tensors, and the
        # version of torch is pinned.
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch._make_per_channel_quantized_tensor(qweight, scales, zeros, 0)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        packed = torch.ops.quantized.linear_prepack(quantized, None)
    finally:
        torch.backends.quantized.engine = before
    return FbgemmInt8Linear(packed, bias, FBGEMM_QMAX, input_limit)


FBGEMM_QMAX = 63
"""Largest magnitude of an activation that is quantized for FBGEMM."""


def activation_qmax(weight: Tensor) -> int:
    """Return the largest magnitude of a quantized activation of `pack_int8(weight, ...)`."""
    return QMAX if supports_int8_tiles(weight) or _has_vnni() else FBGEMM_QMAX


def _has_vnni() -> bool:
    return torch.cpu._is_vnni_supported()


def pack_int8_matrix(
    matrix: QuantizedMatrix, bias: Tensor | None, input_limit: float = 0.0
) -> PackedLinear:
    """Pack an `int8` matrix with one scale per output and zero points 128.

    The codes of `matrix` are overwritten. For `input_limit` see `pack_int8_codes`.
    """
    codes = matrix.codes.bitwise_xor_(128).view(torch.int8)
    return pack_int8_codes(codes, matrix.scales.flatten(), bias, input_limit)


def int8_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, qmax: int) -> Tensor:
    """Reference implementation of `pack_int8` in float64; for `qmax` see `activation_qmax`."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    rows = (x / largest * qmax).round().double()
    matrix = quantize_weight(weight, "int8")
    codes, scales = matrix.codes.double() - 128, matrix.scales.flatten().double()
    y = rows @ codes.T * (largest.double() / qmax) * scales
    return y if bias is None else y + bias
