"""Compares quantization of rows to 8 bits with its reference."""

import pytest
import torch

from penstock.kernels.linear.quantize_rows import quantize_per_token, quantize_per_token_reference


@pytest.mark.parametrize("shape", [(1, 1), (3, 45), (7, 768)])
def test_matches_the_reference(shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * torch.logspace(-20, 20, shape[0])[:, None]
    x[0] = 0
    levels, scales = quantize_per_token(x)
    expected, expected_scales = quantize_per_token_reference(x)
    torch.testing.assert_close(levels, expected, atol=0, rtol=0)
    torch.testing.assert_close(scales, expected_scales)
    assert (levels[0] == 128).all()


def test_strided_rows() -> None:
    x = torch.randn(6, 40)[:, 3:20]
    assert torch.equal(quantize_per_token(x)[0], quantize_per_token_reference(x)[0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_with_nan_or_inf_have_a_non_finite_scale(value: float) -> None:
    x = torch.randn(3, 20)
    x[1, 7] = value
    scales = quantize_per_token(x)[1]
    assert scales.isfinite().flatten().tolist() == [True, False, True]
