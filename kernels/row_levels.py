"""Rows of activations in eight bits: one scale a row, and levels from -127 to 127 about 128.

x_i is about (level_i - 128) f, f = largest |x| / 127. Of a row with a NaN or an infinity f is none
either, so that nothing made of it looks sound. On a CPU only, by numba (`row_levels_loops`).
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.kernels.compiled import ALONE, settle_numba

LEVELS, MIDDLE = 127, 128
LEAST = 1e-30
"""Rows whose largest number is less are as good as zero."""


def row_levels(x: Tensor) -> tuple[Tensor, Tensor]:
    """Levels [T, K] uint8 and factors [T, 1] float32 of x [T, K] float32."""
    levels = torch.empty(x.shape, dtype=torch.uint8)
    factors = torch.empty(len(x), 1)
    threads = 1 if x.numel() < ALONE else torch.get_num_threads()
    _loops().fill(x.contiguous().numpy(), levels.numpy(), factors.view(-1).numpy(), threads)
    return levels, factors


def row_levels_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """What `row_levels` means."""
    largest = x.abs().amax(-1, keepdim=True).clamp_min(LEAST)
    levels = (x * (LEVELS / largest)).round() + MIDDLE
    return levels.to(torch.uint8), largest / LEVELS


def load_loops() -> None:
    """Load the loops; compile them, the first time on a machine."""
    _loops().load()


@cache
def _loops() -> Any:
    settle_numba()
    from penstock.kernels import row_levels_loops

    return row_levels_loops
