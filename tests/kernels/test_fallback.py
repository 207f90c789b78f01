"""Kernel fallbacks on a GPU are counted, and raise an error within `forbid_fallback`."""

import pytest
import torch

from penstock.kernels.activation.op import silu_and_mul
from penstock.kernels.fallback import (
    KernelFallbackError,
    fallback_counts,
    forbid_fallback,
    record_fallback,
)

GPU = torch.device("cuda")


def test_fallbacks_are_counted_on_a_gpu_only() -> None:
    before = fallback_counts()
    record_fallback("attention", torch.device("cpu"), "float64")
    assert fallback_counts() == before
    record_fallback("attention", GPU, "float64")
    assert fallback_counts()["attention"] == before.get("attention", 0) + 1


def test_fallbacks_raise_only_within_forbid_fallback() -> None:
    with forbid_fallback():
        record_fallback("attention", torch.device("cpu"), "float64")
        with pytest.raises(KernelFallbackError, match="attention has no Triton kernel for float64"):
            record_fallback("attention", GPU, "float64")
    record_fallback("attention", GPU, "float64")


def test_computing_on_a_cpu_raises_within_forbid_fallback_for_a_gpu() -> None:
    x = torch.randn(2, 4)
    with (
        forbid_fallback(GPU),
        pytest.raises(
            KernelFallbackError, match="on cpu, so no GPU kernel would compute it: expected cuda"
        ),
    ):
        silu_and_mul(x)
    with (
        forbid_fallback(GPU),
        pytest.raises(KernelFallbackError, match="attention has no Triton kernel"),
    ):
        record_fallback("attention", torch.device("cpu"), "float64")
    for device in (None, torch.device("cpu")):
        with forbid_fallback(device):
            silu_and_mul(x)
