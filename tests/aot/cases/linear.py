"""Cases of `kernels/linear`."""

from collections.abc import Iterator

import torch

from penstock.kernels.linear.batch_invariant import (
    batch_invariant_bmm,
    batch_invariant_matmul,
)
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
