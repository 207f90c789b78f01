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


@pytest.mark.parametrize("limit", [1e-3, 1.5, 300.0])
def test_static_scale_is_the_same_for_all_rows_and_clips(limit: float) -> None:
    x = torch.randn(7, 768) * torch.logspace(-3, 3, 7)[:, None]
    x[0] = 0
    levels, scales = quantize_per_token(x, limit)
    expected, expected_scales = quantize_per_token_reference(x, limit)
    torch.testing.assert_close(levels, expected, atol=0, rtol=0)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(scales, torch.full((7, 1), limit) / 127)
    assert (levels[6].int() - 128).abs().max() == 127
    assert levels.min() >= 1


def test_strided_rows() -> None:
    x = torch.randn(6, 40)[:, 3:20]
    assert torch.equal(quantize_per_token(x)[0], quantize_per_token_reference(x)[0])


@pytest.mark.parametrize("limit", [0.0, 2.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_with_nan_or_inf_have_a_non_finite_scale(value: float, limit: float) -> None:
    x = torch.randn(3, 20)
    x[1, 7] = value
    scales = quantize_per_token(x, limit)[1]
    assert scales.isfinite().flatten().tolist() == [True, False, True]
