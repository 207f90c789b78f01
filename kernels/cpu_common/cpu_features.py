"""Detects the CPU features by which the CPU kernels choose their loops."""

from functools import cache

import torch


@cache
def has_avx512() -> bool:
    """Return whether this CPU supports AVX-512 (16 float32 per vector)."""
    return torch.cpu._is_avx512_supported()


@cache
def has_avx2() -> bool:
    """Return whether this CPU supports AVX2 (8 float32 per vector) or AVX-512."""
    return torch.cpu._is_avx2_supported() or has_avx512()


@cache
def has_vnni() -> bool:
    """Return whether this CPU supports AVX-512 VNNI (products of 8-bit integers)."""
    return has_avx512() and torch.cpu._is_vnni_supported()


@cache
def has_amx() -> bool:
    """Request permission for AMX from the operating system; return whether AMX can be used."""
    if not (has_avx512() and torch.cpu._is_amx_tile_supported()):
        return False
    return bool(torch.cpu._init_amx())
