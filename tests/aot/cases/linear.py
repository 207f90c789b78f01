"""Cases in which `make aot` compiles the kernels of `kernels/linear` ahead of time."""

from collections.abc import Iterator
from functools import partial

import torch

from penstock.kernels.linear.batch_invariant import (
    batch_invariant_bmm,
    batch_invariant_matmul,
)
from penstock.kernels.linear.quantized import Kind, has_zeros, is_narrow, quantized_matmul
from tests.aot.case import AotCase, meta


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
    wide = {"dtype": torch.float32}
    yield AotCase(
        "4096 by 4096, 64 rows, fp32",
        lambda: batch_invariant_matmul(meta(64, 4096, **wide), meta(4096, 4096, **wide)),
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


def _quantized(rows: int, kind: Kind, one_group: bool) -> None:
    bytes_ = {"dtype": torch.uint8}
    quantized_matmul(
        meta(rows, 4096),
        meta(4096, 2048 if is_narrow(kind) else 4096, **bytes_),
        meta(4096, 32, dtype=torch.float32),
        meta(4096, 32 if has_zeros(kind) else 0, **bytes_),
        meta(4096, dtype=torch.int32),
        kind=kind,
        one_group=one_group,
    )
