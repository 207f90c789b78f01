"""Cases in which `make aot` compiles the kernels of `kernels/linear` ahead of time."""

from collections.abc import Iterator
from functools import partial
from operator import attrgetter

import torch

from penstock.kernels.linear.batch_invariant import (
    batch_invariant_bmm,
    batch_invariant_matmul,
)
from penstock.kernels.linear.quantized import Kind, has_zeros, is_narrow, quantized_matmul
from penstock.kernels.linear.w8a8 import Form, quantize_activations, w8a8_matmul
from tests.aot.case import AotCase, meta

FLOAT32 = {"dtype": torch.float32}


def aot_cases() -> Iterator[AotCase]:
    products = ("_matmul_kernel",)
    yield AotCase(
        "4096 by 4096, 64 rows, bf16",
        lambda: batch_invariant_matmul(meta(64, 4096), meta(4096, 4096), meta(4096)),
        products=products,
        streams=("_matmul_kernel", "_add_slices_kernel"),
    )
    yield AotCase(
        "28672 by 4096, 4096 rows, bf16",
        lambda: batch_invariant_matmul(meta(4096, 4096), meta(28672, 4096)),
        products=products,
    )
    yield AotCase(
        "4096 by 4096, 64 rows, fp32",
        lambda: batch_invariant_matmul(meta(64, 4096, **FLOAT32), meta(4096, 4096, **FLOAT32)),
    )
    yield AotCase(
        "deepseek v3, into 16 heads' latents",
        lambda: batch_invariant_bmm(
            meta(64, 16, 192)[:, :, :128], meta(16, 128, 512).transpose(1, 2)
        ),
        products=products,
    )
    quantized = ("_dequantizing_matmul_kernel",)
    cases: tuple[tuple[Kind, int], ...] = (
        *(("int4", 16), ("int4", 4096), ("int8", 64), ("fp8", 64)),
        *(("e2m1", 16), ("nf4", 16), ("fp4", 64)),
    )
    for kind, rows in cases:
        yield AotCase(
            f"4096 by 4096, {kind} in groups of 128, {rows} rows, bf16",
            partial(_quantized, rows, kind, one_group=True),
            products=quantized,
        )
    yield AotCase(
        "4096 by 4096, int4 with act-order, 16 rows, bf16",
        partial(_quantized, 16, "int4", one_group=False),
        products=quantized,
    )
    w8a8: tuple[tuple[Form, int, int], ...] = (
        *(("int8", 1, 16), ("int8", 1, 64), ("int8", 1, 4096)),
        *(("fp8", 1, 16), ("fp8", 1, 64), ("fp8", 1, 4096), ("fp8", 32, 16), ("fp8", 32, 4096)),
    )
    for form, num_groups, rows in w8a8:
        scales = "one scale per row" if num_groups == 1 else "groups of 128"
        yield AotCase(
            f"4096 by 4096, {form} with {form} activations, {scales}, {rows} rows, bf16",
            partial(w8a8_product, form, num_groups, rows),
            products=("_w8a8_matmul_kernel",),
            streams=("_quantize_kernel",),
            supports=attrgetter("multiplies_int8" if form == "int8" else "multiplies_e4m3"),
        )


def w8a8_product(form: Form, num_groups: int, rows: int) -> None:
    """Quantize `rows` rows of 4096 inputs, and multiply them by quantized weights [4096, 4096]."""
    codes, scales = quantize_activations(meta(rows, 4096), form, 4096 // num_groups)
    weight, weight_scales = meta(4096, 4096, dtype=codes.dtype), meta(num_groups, 4096, **FLOAT32)
    w8a8_matmul(codes, scales, weight, weight_scales, meta(4096), dtype=torch.bfloat16)


def _quantized(rows: int, kind: Kind, one_group: bool) -> None:
    bytes_ = {"dtype": torch.uint8}
    quantized_matmul(
        meta(rows, 4096),
        meta(4096, 2048 if is_narrow(kind) else 4096, **bytes_),
        meta(4096, 32, **FLOAT32),
        meta(4096, 32 if has_zeros(kind) else 0, **bytes_),
        meta(4096, dtype=torch.int32),
        kind=kind,
        one_group=one_group,
    )
