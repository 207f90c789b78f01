"""Detects the CPU features by which the CPU kernels choose their loops.

As for torch's own kernels, `ATEN_CPU_CAPABILITY=avx2` or `default` limits the features.
"""

from functools import cache

import torch


@cache
def has_avx512() -> bool:
    """Return whether this CPU supports AVX-512 F, BW, DQ and VL (16 float32 per vector)."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def vector_width() -> int:
    """Return the number of float32 values in a vector of compiled loops: 16 with AVX-512, else 8.

    On a CPU without AVX2, LLVM divides a vector of 8 values into narrower vectors.
    """
    return 16 if has_avx512() else 8


@cache
def has_avx2() -> bool:
    """Return whether this CPU supports AVX2 and FMA (8 float32 per vector), or AVX-512."""
    return torch.backends.cpu.get_cpu_capability() == "AVX2" or has_avx512()


@cache
def has_vnni() -> bool:
    """Return whether this CPU supports AVX-512 VNNI (products of 8-bit integers)."""
    return has_avx512() and torch.cpu._is_vnni_supported()


def has_byte_products() -> bool:
    """Return whether the loops that multiply vectors of 8-bit integers support this CPU.

    They need AVX-512 VNNI (which every CPU with AMX has), or AVX2 on a CPU without AVX-512.
    """
    return has_vnni() if has_avx512() else has_avx2()


@cache
def has_amx() -> bool:
    """Request permission for AMX from the operating system; return whether AMX can be used."""
    if not (has_avx512() and torch.cpu._is_amx_tile_supported()):
        return False
    return bool(torch.cpu._init_amx())
