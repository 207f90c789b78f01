"""Benchmarks of products of quantized weights by quantized activations (W8A8)."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.linear.code_kinds import FP8_GROUP_INPUTS
from penstock.kernels.linear.quantize_weights import quantize_weight
from penstock.kernels.linear.quantized import QuantizedMatrix, even_groups, pack_quantized
from penstock.kernels.linear.w8a8 import Form, has_w8a8_products, pack_w8a8
from penstock.loadtests.gpu.clock import Call
from penstock.loadtests.gpu.goals import PLAIN, Goal
from penstock.loadtests.gpu.work import Work

FEW = Goal(least_fraction=0.70)
MANY = Goal(least_of_peer=0.70)
"""Goals of few rows, whose product reads the weights once, and of many rows."""


def product_work(device: torch.device, dtype: torch.dtype, small: bool) -> Iterator[Work]:
    """Yield benchmarks of a layer of an 8B model: 4096 inputs, 28672 outputs (gate and up)."""
    outputs, inputs = (70, 256) if small else (28672, 4096)
    forms: tuple[tuple[Form, bool], ...] = (("int8", False), ("fp8", False), ("fp8", True))
    for form, has_groups in forms:
        if has_w8a8_products(form, device):
            for rows, goal in ((16, FEW), (4096, MANY)):
                tokens = min(rows, 20) if small else rows
                yield _product(form, has_groups, tokens, outputs, inputs, goal, device, dtype)


def _product(
    form: Form,
    has_groups: bool,
    rows: int,
    outputs: int,
    inputs: int,
    goal: Goal,
    device: torch.device,
    dtype: torch.dtype,
) -> Work:
    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def ours() -> Call:
        layer = pack_w8a8(_matrix(form, has_groups, randn(outputs, inputs)), None, form)
        assert layer is not None
        return partial(layer, randn(rows, inputs))

    def weight_only() -> Call:
        matrix = _matrix(form, has_groups, randn(outputs, inputs))
        return partial(pack_quantized(matrix, None, dtype), randn(rows, inputs))

    def by_torch() -> Call:
        return partial(functional.linear, randn(rows, inputs), randn(outputs, inputs))

    def by_library() -> Call:
        """Multiply codes that exist already, with the vendor's library; any values will do."""
        x = _matrix(form, False, randn(rows, inputs))
        weight = _matrix(form, False, randn(outputs, inputs))
        if form == "int8":
            codes = (x.codes.view(torch.int8), weight.codes.view(torch.int8).T)
            return partial(torch._int_mm, *codes)
        kind = torch.float8_e4m3fn
        return partial(
            torch._scaled_mm, x.codes.view(kind), weight.codes.view(kind).T,
            scale_a=x.scales, scale_b=weight.scales.T, out_dtype=dtype,
        )  # fmt: skip

    groups = f", groups of {FP8_GROUP_INPUTS}" if has_groups else ""
    num_bytes = outputs * inputs + rows * (inputs + outputs) * dtype.itemsize
    return Work(
        f"{form} W8A8 product{groups}, {rows} rows, {outputs} x {inputs}",
        goal,
        num_bytes,
        2 * rows * outputs * inputs,
        ours,
        {PLAIN: weight_only, f"torch, {dtype}": by_torch, f"torch, {form} codes": by_library},
    )


def _matrix(form: Form, has_groups: bool, weight: Tensor) -> QuantizedMatrix:
    matrix = quantize_weight(weight, form)
    if not has_groups:
        return matrix
    groups = even_groups(weight.shape[1], FP8_GROUP_INPUTS, weight.device)
    scales = matrix.scales.repeat(1, int(groups[-1]) + 1)
    return QuantizedMatrix(matrix.kind, matrix.codes, scales, matrix.zeros, groups)
