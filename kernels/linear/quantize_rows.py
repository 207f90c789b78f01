"""Rows of activations in eight bits: one scale a row, and levels from -127 to 127 about 128.

x_i is about (level_i - 128) f, f = largest |x| / 127. Of a row with a NaN or an infinity f is none
either, so that nothing made of it looks sound. On a CPU only, by numba
(`linear/cpu_quantize_rows`).
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.cpu_common.numba_runtime import MIN_PARALLEL_ELEMENTS, configure_numba

QMAX, ZERO_POINT = 127, 128
MIN_SCALE = 1e-30
"""Rows whose largest number is less are as good as zero."""


def quantize_per_token(x: Tensor) -> tuple[Tensor, Tensor]:
    """Levels [T, K] uint8 and factors [T, 1] float32 of x [T, K] float32."""
    qvalues = torch.empty(x.shape, dtype=torch.uint8)
    factors = torch.empty(len(x), 1)
    threads = 1 if x.numel() < MIN_PARALLEL_ELEMENTS else torch.get_num_threads()
    _cpu_kernels().run(x.contiguous().numpy(), qvalues.numpy(), factors.view(-1).numpy(), threads)
    return qvalues, factors


def quantize_per_token_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """What `quantize_per_token` means."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min(MIN_SCALE)
    qvalues = (x * (QMAX / largest)).round() + ZERO_POINT
    return qvalues.to(torch.uint8), largest / QMAX


def load_cpu_kernels() -> None:
    """Load the loops; compile them, the first time on a machine."""
    _cpu_kernels().load()


@cache
def _cpu_kernels() -> Any:
    configure_numba()
    from penstock.kernels.linear import cpu_quantize_rows

    return cpu_quantize_rows
