"""Per-token quantization of activations to uint8: one scale per row, zero point 128.

x_i ≈ (q_i - 128) f with q_i from 1 to 255 and the row's scale f = max |x| / 127. With a static
scale, f = limit / 127 for all rows, and larger values are clipped to the limit. If a row contains
NaN or Inf, f is NaN or Inf, so the error propagates to the output. The loops exist only for CPUs;
numba compiles them (`linear/cpu_quantize_rows`).
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.cpu_common.numba_runtime import MIN_PARALLEL_ELEMENTS, configure_numba

QMAX, ZERO_POINT = 127, 128
MIN_SCALE = 1e-30
"""Lower bound for max |x| of a row. It prevents a division by zero if all elements of the row are
zero."""


def quantize_per_token(x: Tensor, limit: float = 0.0) -> tuple[Tensor, Tensor]:
    """Quantize x [T, K] float32. Return the values [T, K] uint8 and the scales [T, 1] float32.

    Args:
        limit: largest magnitude with a static scale; 0: the largest magnitude of each row.
    """
    qvalues = torch.empty(x.shape, dtype=torch.uint8)
    factors = torch.empty(len(x), 1)
    threads = 1 if x.numel() < MIN_PARALLEL_ELEMENTS else torch.get_num_threads()
    _cpu_kernels().run(
        x.contiguous().numpy(), qvalues.numpy(), factors.view(-1).numpy(), limit, threads
    )
    return qvalues, factors


def quantize_per_token_reference(x: Tensor, limit: float = 0.0) -> tuple[Tensor, Tensor]:
    """Reference implementation of `quantize_per_token`."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min(MIN_SCALE)
    if limit:
        largest = torch.where(largest.isfinite(), limit, largest)
        x = x.clamp(-limit, limit)
    qvalues = (x * (QMAX / largest)).round() + ZERO_POINT
    return qvalues.to(torch.uint8), largest / QMAX


def load_cpu_kernels() -> None:
    """Load the compiled loops, compiling them if they are not in the cache on disk."""
    _cpu_kernels().load()


@cache
def _cpu_kernels() -> Any:
    configure_numba()
    from penstock.kernels.linear import cpu_quantize_rows

    return cpu_quantize_rows
