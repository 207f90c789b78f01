"""Splitting a float32 into three bfloat16 parts is exact."""

from typing import Any

import numpy as np
import pytest

from penstock.kernels.cpu_common.cpu_features import has_avx512


@pytest.mark.skipif(not has_avx512(), reason="needs AVX-512")
def test_three_bfloat16_parts_sum_exactly_to_the_float32() -> None:
    import numba

    from penstock.kernels.cpu_common.amx import split_bf16x3
    from penstock.kernels.cpu_common.simd import load_wide, store

    @numba.njit
    def split(a: Any, b: Any, out: Any) -> None:
        first, second, third = split_bf16x3(load_wide(a, 0), load_wide(b, 0))
        store(out, 0, first)
        store(out, 16, second)
        store(out, 32, third)

    generator = np.random.default_rng(0)
    numbers = generator.normal(size=(2, 16)).astype(np.float32)
    numbers *= np.float32(2.0) ** generator.integers(-60, 60, (2, 16)).astype(np.float32)
    words = np.empty(48, np.float32)
    split(numbers[0].copy(), numbers[1].copy(), words)
    bits = words.view(np.uint32).reshape(3, 16)
    low = (bits << np.uint32(16)).view(np.float32).astype(np.float64).sum(0)
    high = (bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64).sum(0)
    assert (low == numbers[0]).all()
    assert (high == numbers[1]).all()
