"""Linear layers of quantized weights and activations (W8A8) on a GPU: y = x Wᵀ + b.

x is [T, K] and y [T, N]. The codes of both operands are int8, or both are float8_e4m3fn, and the
tensor cores multiply the codes. With g(k) as the group of input k, x[t, k] is about
q[t, k] s[t, g(k)], and W[n, k] = c[n, k] r[n, g(k)], so

    y[t, n] = sum over groups g of (s[t, g] r[n, g] (sum over k in g of q[t, k] c[n, k])) + b[n].

- INT8: one group, that is, one scale per token and one scale per output. Sums are exact, in int32.
- FP8: one group, or groups of `FP8_GROUP_INPUTS` inputs (the weights of DeepSeek V3, whose blocks
  of 128 x 128 share a scale). Sums of 128 inputs are scaled and added in float32.

The scales s of the activations are computed at run time, from the inputs of a token only:
s = max |x| / 127 as in `quantize_rows`, or max |x| / 448 for FP8. With a static scale, s is the
same for all tokens, and larger inputs are clipped. If a group contains NaN or Inf, s is NaN or Inf,
so the error propagates to the output. A row of y does not depend on other rows (see
`triton_w8a8.tiles_for`).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.checks import E4M3, E4M3_MAX, FLOATS, check, check_contiguous
from penstock.kernels.linear.code_kinds import FP8_GROUP_INPUTS
from penstock.kernels.linear.quantize_rows import MIN_SCALE, QMAX, ZERO_POINT
from penstock.kernels.linear.quantized import QuantizedMatrix, even_groups
from penstock.kernels.linear.triton_w8a8 import quantize_activations_triton, w8a8_matmul_triton
from penstock.kernels.triton_common.launch import device_info, runs_kernels, use_triton

Form = Literal["int8", "fp8"]

_DTYPES: dict[Form, torch.dtype] = {"int8": torch.int8, "fp8": E4M3}
_MOST: dict[Form, float] = {"int8": QMAX, "fp8": E4M3_MAX}

MAX_INT8_INPUTS = 2**31 // (QMAX * 128)
"""Largest number of inputs for which no sum of INT8 products overflows int32."""


def has_w8a8_products(form: Form, device: torch.device) -> bool:
    """Return whether the device has kernels and tensor cores for W8A8 products of this form."""
    if not runs_kernels(device):
        return False
    chip = device_info(torch.empty(0, device=device))
    return chip.multiplies_int8 if form == "int8" else chip.multiplies_e4m3


def quantize_activations(
    x: Tensor, form: Form, group_size: int, limit: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Quantize the rows of x [T, K], with one scale per group of `group_size` inputs.

    Args:
        x: float32, float16 or bfloat16 with contiguous rows, on a GPU; K is at least 1.
        group_size: `FP8_GROUP_INPUTS`, or K (or more) for one scale per row.
        limit: largest magnitude of x with a static scale; 0: that of each group.

    Returns:
        Codes [T, K], int8 or float8_e4m3fn, and scales [T, G] float32.

    Raises:
        ValueError: a shape, dtype or stride is wrong, or x is on a CPU.
    """
    if not use_triton(x):
        raise ValueError(f"x is on {x.device}: expected a GPU")
    check("x", x, ("T", "K"), FLOATS)
    if not x.shape[1]:
        raise ValueError("x has 0 input features: expected at least 1")
    if group_size < x.shape[1] and group_size != FP8_GROUP_INPUTS:
        raise ValueError(
            f"group_size is {group_size}: expected {FP8_GROUP_INPUTS}, or at least {x.shape[1]} "
            "for one group of all inputs"
        )
    most = _MOST[form]
    return quantize_activations_triton(x, _DTYPES[form], group_size, most, MIN_SCALE, limit)


def quantize_activations_reference(
    x: Tensor, form: Form, group_size: int, limit: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Reference implementation of `quantize_activations`."""
    num_rows, num_inputs = x.shape
    size, most = min(group_size, num_inputs), _MOST[form]
    grouped = functional.pad(x.float(), (0, -num_inputs % size)).view(num_rows, -1, size)
    largest = grouped.abs().amax(2).clamp_min(MIN_SCALE)
    if limit:
        largest = torch.where(largest.isfinite(), limit, largest)
    # torch would compute `most / largest` as a product with the reciprocal, which rounds twice.
    steps = torch.full_like(largest, most) / largest
    levels = (grouped * steps[:, :, None]).clamp(-most, most)
    codes = (levels.round() if form == "int8" else levels).to(_DTYPES[form])
    return codes.view(num_rows, -1)[:, :num_inputs].contiguous(), largest / most


def w8a8_matmul(
    x: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """Return y [T, N] of `dtype` from codes and scales.

    Args:
        x: [T, K] int8 or float8_e4m3fn codes, contiguous, on a GPU.
        x_scales: [T, G] float32. G is 1, or the number of groups of `FP8_GROUP_INPUTS` inputs.
        weight: [N, K] codes, contiguous; dtype of x.
        weight_scales: [G, N] float32.
        bias: [N] of `dtype`, or None.

    Raises:
        ValueError: a shape, dtype or stride is wrong, or x is on a CPU.
    """
    if not use_triton(x):
        raise ValueError(f"x is on {x.device}: expected a GPU")
    check("x", x, ("T", "K"), tuple(_DTYPES.values()))
    num_inputs = x.shape[1]
    check("weight", weight, ("N", num_inputs), (x.dtype,), like=x)
    check("x_scales", x_scales, (len(x), "G"), (torch.float32,), like=x)
    num_groups = x_scales.shape[1]
    allowed = {1} if x.dtype == torch.int8 else {1, -(-num_inputs // FP8_GROUP_INPUTS)}
    if num_groups not in allowed:
        expected = " or ".join(map(str, sorted(allowed)))
        raise ValueError(f"x_scales has {num_groups} groups: expected {expected}")
    check("weight_scales", weight_scales, (num_groups, len(weight)), (torch.float32,), like=x)
    given = {"x": x, "weight": weight, "x_scales": x_scales, "weight_scales": weight_scales}
    for name, tensor in given.items():
        check_contiguous(name, tensor)
    if dtype not in FLOATS:
        raise ValueError(f"dtype is {dtype}: expected float32, float16 or bfloat16")
    if bias is not None:
        check("bias", bias, (len(weight),), (dtype,), like=x)
    return w8a8_matmul_triton(x, x_scales, weight, weight_scales, bias, dtype)


def w8a8_matmul_reference(
    x: Tensor, x_scales: Tensor, weight: Tensor, weight_scales: Tensor, bias: Tensor | None
) -> Tensor:
    """Reference implementation of `w8a8_matmul` in float64."""
    y = dequantize(x, x_scales) @ dequantize(weight, weight_scales.T).T
    return y if bias is None else y + bias.double()


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return codes [R, K] times their scales [R, G], in float64."""
    num_inputs, num_groups = codes.shape[1], scales.shape[1]
    size = num_inputs if num_groups == 1 else FP8_GROUP_INPUTS
    return codes.double() * scales.double().repeat_interleave(size, 1)[:, :num_inputs]


@dataclass(frozen=True, slots=True)
class W8A8Linear:
    """A linear layer of quantized weights and activations, computed by `w8a8_matmul`."""

    form: Form
    weight: Tensor  # [N, K] int8 or float8_e4m3fn
    scales: Tensor  # [G, N] float32
    bias: Tensor | None
    input_limit: float = 0.0  # `limit` of `quantize_activations`

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        size = x.shape[1] if len(self.scales) == 1 else FP8_GROUP_INPUTS
        codes, scales = quantize_activations(x, self.form, size, self.input_limit)
        return w8a8_matmul(codes, scales, self.weight, self.scales, self.bias, dtype=x.dtype)


def pack_w8a8(
    matrix: QuantizedMatrix, bias: Tensor | None, form: str, input_limit: float = 0.0
) -> W8A8Linear | None:
    """Pack a linear layer with quantized activations, without a copy of the codes.

    Args:
        matrix: the weights. If they are packed and have the kind `int8`, their codes are
            overwritten.
        bias: [N] of the dtype of the activations, or None.
        form: form of the activations: "int8", "fp8", or another one, which has no products.
        input_limit: `limit` of `quantize_activations`.

    Returns:
        The layer; None if the device has no product of this form for these weights.
    """
    codes = matrix.codes
    if form == "int8":
        if not _has_int8_codes(matrix) or not has_w8a8_products("int8", codes.device):
            return None
        weight = codes.bitwise_xor_(ZERO_POINT).view(torch.int8)
        return W8A8Linear("int8", weight, matrix.scales.T.contiguous(), bias, input_limit)
    if form != "fp8" or not _has_fp8_codes(matrix) or not has_w8a8_products("fp8", codes.device):
        return None
    return W8A8Linear("fp8", codes.view(E4M3), matrix.scales.T.contiguous(), bias, input_limit)


def _has_int8_codes(matrix: QuantizedMatrix) -> bool:
    """Return whether the weights are symmetric INT8 with one scale per output."""
    num_inputs, num_groups = len(matrix.groups), matrix.scales.shape[1]
    return (
        matrix.kind == "int8"
        and num_groups == 1
        and 0 < num_inputs <= MAX_INT8_INPUTS
        and bool((matrix.zeros == ZERO_POINT).all())
    )


def _has_fp8_codes(matrix: QuantizedMatrix) -> bool:
    """Return whether the weights are FP8 with one scale per output, or per output and group."""
    num_inputs, num_groups = len(matrix.groups), matrix.scales.shape[1]
    if matrix.kind != "fp8" or not num_inputs:
        return False
    size = num_inputs if num_groups == 1 else FP8_GROUP_INPUTS
    return torch.equal(matrix.groups, even_groups(num_inputs, size, matrix.groups.device))
