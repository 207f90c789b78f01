"""Products of activations with weights that are the same at every step: y = x Wᵀ + b.

x [T, K] and W [N, K] give [T, N]. Weights are packed once, as a CPU's fast forms read them:

- float32, in panels (`cpu_packed_f32`), on CPUs with wide vectors;
- float32, blocked for oneDNN, on others: up to twice as fast as unpacked for 2 to 32 rows, and
  equal for more.
  An element's sum has then the same order for any number of rows and threads, as far as has been
  seen (docs/performance.md); `pack_batch_invariant`, which promises it, tries it, and else pads;
- INT8: a row of weights has one scale, and so has a row of activations, found as it comes:
  y = s_x s_w (x / s_x)₈ (W / s_w)₈ᵀ, summed in 32 bits. Nothing of a row depends on the others.
  By a matrix unit where there is one (`cpu_packed_int8`), else by oneDNN with VNNI instructions; by
  FBGEMM without, where products of 8 by 8 bits saturate, so that activations then have 7.

On a GPU only `pack_batch_invariant` is made here, of a kernel that promises it
(`batch_invariant`).
"""

import platform
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.linear.batch_invariant import BatchInvariantLinear
from penstock.kernels.linear.cpu_packed_f32 import pack_f32, supports_packed_f32
from penstock.kernels.linear.cpu_packed_int8 import pack_int8_amx, supports_amx_int8
from penstock.kernels.linear.quantize_rows import ZERO_POINT, quantize_per_token
from penstock.kernels.triton_common.launch import FLOATS, runs_kernels


class PackedLinear(Protocol):
    """Weights in some form."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class OneDnnLinear:
    """float32, with the plain weights beside: for a single row these are the faster form."""

    weight: Tensor | None  # [N, K]; None: a single row is computed like any other
    blocked: Tensor  # the same, opaque
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) == 1 and self.weight is not None:
            return functional.linear(x, self.weight, self.bias)
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.blocked, self.bias, "none", [], "")
        return y


def pack_onednn(weight: Tensor, bias: Tensor | None) -> OneDnnLinear:
    """weight: [N, K] float32 contiguous on a CPU with oneDNN (`supports_onednn`)."""
    return OneDnnLinear(weight, _reorder(weight), bias)


@dataclass(frozen=True, slots=True)
class PaddedLinear:
    """Rows in blocks of one size, the last one filled up: a library has one way for that many."""

    product: PackedLinear
    rows: int = 16

    def __call__(self, x: Tensor) -> Tensor:
        filled = functional.pad(x, (0, 0, 0, -len(x) % self.rows))
        made = [self.product(block) for block in torch.split(filled, self.rows)]
        return torch.cat(made)[: len(x)]


def pack_batch_invariant(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """A form in which a row's bits depend on that row alone; on a CPU nothing of `weight` is kept.

    weight: [N, K], on a CPU of any strides; where there is no such form:
    `batch_invariant_unsupported_reason`.
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
"""Whether the library computes rows alone here, by N, K and threads; as tried."""


def _is_batch_invariant(product: PackedLinear, num_inputs: int) -> bool:
    x = torch.randn(160, num_inputs, generator=torch.Generator().manual_seed(0))
    whole = product(x)
    ranges = ((at, at + rows) for at, rows in ((0, 1), (9, 2), (3, 3), (5, 7), (1, 17), (30, 64)))
    return all(torch.equal(product(x[at:end]), whole[at:end]) for at, end in ranges)


def batch_invariant_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str:
    """Why `pack_batch_invariant` is not to be had here; empty where it is."""
    if runs_kernels(device):
        return "" if dtype in FLOATS else f"it takes floats of 16 or 32 bits, not {dtype}"
    if device.type != "cpu":
        return f"it is made for CPUs and CUDA, not for {device.type}"
    if dtype != torch.float32:
        return f"on a CPU it takes float32, not {str(dtype).removeprefix('torch.')}"
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return f"this torch has no oneDNN for {platform.machine()}"
    return ""


def _reorder(weight: Tensor) -> Tensor:
    rows_hint = 64
    blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, rows_hint)
    return blocked


def supports_onednn(weight: Tensor) -> bool:
    """Whether `pack_onednn` takes these weights."""
    return (
        torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.is_contiguous()
    )


def int8_unsupported_reason(device: torch.device, dtype: torch.dtype) -> str:
    """Why INT8 products are not to be had here; empty where they are."""
    if device.type != "cpu":
        return f"INT8 products are made for CPUs, not for {device.type}"
    if dtype != torch.float32:
        return f"INT8 products take float32 activations, not {str(dtype).removeprefix('torch.')}"
    if "fbgemm" not in torch.backends.quantized.supported_engines:
        return f"this torch has no INT8 products (FBGEMM) for {platform.machine()}"
    return ""


@dataclass(frozen=True, slots=True)
class OneDnnInt8Linear:
    packed: Tensor  # oneDNN's
    scales: Tensor  # [N]
    zeros: Tensor  # [N] int32
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if not len(x):
            return x.new_empty(0, len(self.scales))
        qvalues, factors = quantize_per_token(x)
        y: Tensor = torch.ops.onednn.qlinear_pointwise(
            qvalues, 1.0, ZERO_POINT, self.packed, self.scales, self.zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        y.mul_(factors)
        return y if self.bias is None else y.add_(self.bias)


@dataclass(frozen=True, slots=True)
class FbgemmInt8Linear:
    packed: Any  # FBGEMM's
    bias: Tensor | None
    steps: int  # of a row's activations, from zero to the largest

    def __call__(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(x.dtype).tiny)
        y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / largest, 1 / self.steps, self.steps + 1, self.packed
        )
        y.mul_(largest)
        return y if self.bias is None else y.add_(self.bias)


def pack_int8(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """weight: [N, K] float32, of which nothing is kept."""
    scales, qweight = _quantized_rows(weight)
    if supports_amx_int8(weight):
        return pack_int8_amx(qweight, scales, bias)
    if _has_vnni():
        packed = torch.ops.onednn.qlinear_prepack(qweight, None)
        return OneDnnInt8Linear(packed, scales, torch.zeros(len(weight), dtype=torch.int32), bias)
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    with warnings.catch_warnings():
        # Such tensors are to leave torch one day; the version is pinned, and nothing else packs.
        warnings.simplefilter("ignore", UserWarning)
        quantized = torch._make_per_channel_quantized_tensor(qweight, scales, zeros, 0)
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"
    try:
        packed = torch.ops.quantized.linear_prepack(quantized, None)
    finally:
        torch.backends.quantized.engine = before
    return FbgemmInt8Linear(packed, bias, activation_qmax())


def activation_qmax() -> int:
    """Steps of an activation on either side of zero."""
    return 127 if _has_vnni() else 63


def _has_vnni() -> bool:
    return torch.cpu._is_vnni_supported()


def _quantized_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [N] float32, and [N, K] int8 from -127 to 127."""
    scales = weight.abs().amax(1).clamp_min(torch.finfo(weight.dtype).tiny) / 127
    qweight = (weight / scales[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    return scales, qweight


def int8_linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None, qmax: int) -> Tensor:
    """What `pack_int8` means, in float64."""
    scales, qweight = _quantized_rows(weight)
    largest = x.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)
    rows = (x / largest * qmax).round().double()
    y = rows @ qweight.double().T * (largest.double() / qmax) * scales.double()
    return y if bias is None else y + bias
