"""Rows in eight bits: as the reference, and what is broken stays so."""

import pytest
import torch

from penstock.kernels.linear.quantize_rows import quantize_per_token, quantize_per_token_reference


@pytest.mark.parametrize("shape", [(1, 1), (3, 45), (7, 768)])
def test_as_the_reference(shape: tuple[int, int]) -> None:
    x = torch.randn(shape) * torch.logspace(-20, 20, shape[0])[:, None]
    x[0] = 0
    levels, factors = quantize_per_token(x)
    expected, expected_factors = quantize_per_token_reference(x)
    torch.testing.assert_close(levels, expected, atol=0, rtol=0)
    torch.testing.assert_close(factors, expected_factors)
    assert (levels[0] == 128).all()


def test_a_view_is_read_as_it_is() -> None:
    x = torch.randn(6, 40)[:, 3:20]
    assert torch.equal(quantize_per_token(x)[0], quantize_per_token_reference(x)[0])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_broken_row_has_no_factor(value: float) -> None:
    x = torch.randn(3, 20)
    x[1, 7] = value
    factors = quantize_per_token(x)[1]
    assert factors.isfinite().flatten().tolist() == [True, False, True]
