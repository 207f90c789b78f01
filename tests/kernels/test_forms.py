"""Plain forms on a GPU are counted, and refused where only kernels are wanted."""

import pytest
import torch

from penstock.kernels.activation import silu_mul
from penstock.kernels.forms import NoKernel, kernels_only, plain_form, plain_forms

GPU = torch.device("cuda")


def test_plain_forms_count_on_a_gpu_only() -> None:
    before = plain_forms()
    plain_form("attention", torch.device("cpu"), "float64")
    assert plain_forms() == before
    plain_form("attention", GPU, "float64")
    assert plain_forms()["attention"] == before.get("attention", 0) + 1


def test_they_are_refused_within_kernels_only() -> None:
    with kernels_only():
        plain_form("attention", torch.device("cpu"), "float64")
        with pytest.raises(NoKernel, match="attention has no kernel for this: float64"):
            plain_form("attention", GPU, "float64")
    plain_form("attention", GPU, "float64")


def test_a_cpus_form_is_refused_where_a_gpu_is_meant() -> None:
    x = torch.randn(2, 4)
    with (
        kernels_only(GPU),
        pytest.raises(NoKernel, match="on cpu would not be computed by a kernel on cuda"),
    ):
        silu_mul(x)
    with kernels_only(GPU), pytest.raises(NoKernel, match="attention has no kernel"):
        plain_form("attention", torch.device("cpu"), "float64")
    for device in (None, torch.device("cpu")):
        with kernels_only(device):
            silu_mul(x)
