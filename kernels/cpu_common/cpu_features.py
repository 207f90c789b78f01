"""What this machine's CPU can do, as far as loops are chosen by it."""

from functools import cache

import torch


@cache
def has_avx512() -> bool:
    """Whether this machine computes 16 numbers at once."""
    return torch.cpu._is_avx512_supported()


@cache
def has_amx() -> bool:
    """Whether this machine has one (AMX), and this process may use it; asks for that, too."""
    if not (has_avx512() and torch.cpu._is_amx_tile_supported()):
        return False
    return bool(torch.cpu._init_amx())
