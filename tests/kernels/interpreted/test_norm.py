"""Compares the Triton kernel of RMS and layer norms with a float64 reference."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.norm import triton as norm
from penstock.kernels.norm.op import (
    fused_add_gemma_rms_norm,
    fused_add_layer_norm,
    fused_add_rms_norm,
    gemma_rms_norm,
    layer_norm,
    layer_norm_reference,
    rms_norm,
    rms_norm_,
    rms_norm_reference,
)
from tests.support.devices import DTYPES, ON_GPU
from tests.support.kernels import close

pytestmark = pytest.mark.interpreted


@settings(max_examples=12)
@given(
    st.integers(0, 70),
    st.sampled_from([1, 2, 3, 63, 64, 100, 256, 1100]),
    st.sampled_from(DTYPES),
)
def test_rms_norm_matches_the_reference(num_rows: int, dim: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(num_rows, dim).to(dtype) * 9, torch.randn(dim).to(dtype)
    close(rms_norm(x, weight, 1e-5), rms_norm_reference(x.double(), weight, 1e-5))


@settings(max_examples=8)
@given(st.integers(1, 9), st.sampled_from([1, 24, 100, 128]), st.sampled_from(DTYPES))
def test_layer_norm_matches_the_reference(num_rows: int, dim: int, dtype: torch.dtype) -> None:
    x, weight, bias = (torch.randn(*n, dim).to(dtype) for n in ((num_rows,), (), ()))
    x = x * 3 + 7  # normally distributed, with mean 7 and standard deviation 3
    expected = layer_norm_reference(x.double(), weight, bias, 1e-5)
    close(layer_norm(x, weight, bias, 1e-5), expected, 3.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fused_add_rounds_the_sum_before_the_norm(dtype: torch.dtype) -> None:
    hidden, x, weight, bias = (torch.randn(*n, 96).to(dtype) for n in ((5,), (5,), (), ()))
    summed = hidden + x
    gemma = gemma_rms_norm(summed, weight, 1e-5)
    cases: list[tuple[Callable[[torch.Tensor], torch.Tensor], torch.Tensor]] = [
        (lambda h: fused_add_rms_norm(h, x, weight, 1e-5), rms_norm(summed, weight, 1e-5)),
        (lambda h: fused_add_gemma_rms_norm(h, x, weight, 1e-5), gemma),
        (
            lambda h: fused_add_layer_norm(h, x, weight, bias, 1e-5),
            layer_norm(summed, weight, bias, 1e-5),
        ),
    ]
    for fused, expected in cases:
        stream = hidden.clone()
        assert torch.equal(fused(stream), expected)
        assert torch.equal(stream, summed)


def test_gemma_rms_norm_adds_one_in_float32() -> None:
    x = torch.randn(4, 64).half()
    weight = torch.full((64,), 2.0**-13).half()  # so small that 1 + weight rounds to 1 in float16
    expected = rms_norm_reference(x.double(), 1 + weight.double(), 1e-5)
    found = gemma_rms_norm(x, weight, 1e-5)
    close(found, expected)
    assert not torch.equal(found, rms_norm(x, torch.ones(64).half(), 1e-5))


def test_rms_norm_of_views_in_place() -> None:
    fused, weight = torch.randn(7, 6, 24), torch.randn(24)
    expected = fused.clone()
    expected[:, 2:5] = rms_norm_reference(fused[:, 2:5].double(), weight, 1e-6).float()
    rms_norm_(fused[:, 2:5], weight, 1e-6)
    close(fused, expected)
    assert torch.equal(fused[:, :2], expected[:, :2])
    rows = torch.randn(5, 40)
    whole = rows.clone()
    rms_norm_(rows[:, :24], weight, 1e-6)
    close(rows[:, :24], rms_norm_reference(whole[:, :24].double(), weight, 1e-6))
    assert torch.equal(rows[:, 24:], whole[:, 24:])


def in_place(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    rms_norm_(x, weight, 1e-5)
    return x


FORMS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rms": lambda x, weight, bias: rms_norm(x, weight, 1e-5),
    "rms in place": in_place,
    "above one": lambda x, weight, bias: gemma_rms_norm(x, weight, 1e-5),
    "layer": lambda x, weight, bias: layer_norm(x, weight, bias, 1e-5),
    "of a sum": lambda x, weight, bias: fused_add_rms_norm(x, x.flip(1), weight, 1e-5),
    "above one, of a sum": lambda x, weight, bias: fused_add_gemma_rms_norm(
        x, x.flip(1), weight, 1e-5
    ),
    "layer, of a sum": lambda x, weight, bias: fused_add_layer_norm(
        x, x.flip(1), weight, bias, 1e-5
    ),
}


@pytest.mark.parametrize("dim", [48, 4096])
@pytest.mark.parametrize("name", FORMS)
def test_row_bits_do_not_depend_on_the_batch(name: str, dim: int) -> None:
    x, weight, bias = torch.randn(90, dim), torch.randn(dim), torch.randn(dim)
    batched = FORMS[name](x.clone(), weight, bias)
    for row in (0, 41, 89):
        assert torch.equal(FORMS[name](x[row : row + 1].clone(), weight, bias)[0], batched[row])


def test_a_row_with_nan_does_not_affect_others() -> None:
    x = torch.randn(50, 48)
    x[7, 3] = torch.nan
    found = rms_norm(x, torch.ones(48), 1e-5)
    assert found[7].isnan().all()
    assert found.isnan().any(1).sum() == 1


def test_invalid_arguments_are_refused() -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)
    with pytest.raises(ValueError, match=r"weight has shape \[63\]: expected \[64\]"):
        rms_norm(x, weight[:63], 1e-5)
    with pytest.raises(ValueError, match="weight has dtype float16: expected float32"):
        rms_norm(x, weight.half(), 1e-5)
    with pytest.raises(
        ValueError, match="x has dtype int64: expected float32 or float16 or bfloat16"
    ):
        rms_norm(x.long(), weight.long(), 1e-5)
    with pytest.raises(ValueError, match=r"x has stride .* in the last dimension"):
        rms_norm_(x.t(), weight[:4], 1e-5)
    with pytest.raises(ValueError, match=r"x has shape .*: expected \[4, 64\]"):
        fused_add_rms_norm(x, x[:3], weight, 1e-5)
    wide = norm.MAX_FEATURES + 1
    with pytest.raises(ValueError, match=r"x has .* features per row: expected 1 to"):
        rms_norm(torch.empty(1, wide), torch.empty(wide), 1e-5)


@pytest.mark.skipif(ON_GPU, reason="a GPU computes bfloat16")
def test_bfloat16_is_refused_by_the_interpreter() -> None:
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="bfloat16"):
        rms_norm(x, x[0], 1e-5)
