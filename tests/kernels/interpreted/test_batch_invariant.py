"""The Triton kernels of batch-invariant matrix products."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.linear import triton_batch_invariant as module
from penstock.kernels.linear.batch_invariant import (
    batch_invariant_bmm,
    batch_invariant_bmm_reference,
    batch_invariant_matmul,
    batch_invariant_matmul_reference,
)
from tests.support.devices import DTYPES, ON_GPU, exact_products
from tests.support.poison import poisoned_memory

SHAPES = [(1, 1, 1), (3, 5, 7), (129, 130, 65), (70, 150, 1100)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "outputs", "inputs"), SHAPES)
def test_matches_the_reference(
    device: torch.device, dtype: torch.dtype, rows: int, outputs: int, inputs: int
) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 2 * inputs).to(device, dtype)[:, :inputs]
    weight = (torch.randn(outputs, inputs + 3) / inputs**0.5).to(device, dtype)[:, :inputs]
    bias = torch.randn(outputs).to(device, dtype) if rows > 1 else None
    with poisoned_memory():
        found = batch_invariant_matmul(x, weight, bias)
    expected = batch_invariant_matmul_reference(x, weight, bias)
    compare(found, expected, x, weight.T)
    assert found.dtype == dtype


def compare(found: Tensor, expected: Tensor, x: Tensor, weight: Tensor) -> None:
    """Compare products of `x` [..., K] and `weight` [K, N], summed in float32.

    A GPU sums in another order than numpy. The error of a float32 sum of K products is bounded by
    sqrt(K) * 2**-24 times the sum of their absolute values, with high probability for rounding
    errors of mean zero (Higham and Mary, "A New Approach to Probabilistic Rounding Error Analysis",
    2019). Values of `found`'s dtype are rounded once more.
    """
    eps = torch.finfo(found.dtype).eps
    bound = torch.full_like(expected, 4e-6)
    if ON_GPU:
        sums = x.double().abs() @ weight.double().abs()
        bound = torch.maximum(bound, (x.shape[-1] ** 0.5 * 2.0**-24 * sums).to(bound.device))
    assert ((found.double() - expected).abs() <= bound + eps * expected.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_row_bits_do_not_depend_on_the_batch(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(140, 1100).to(device, dtype), torch.randn(40, 1100).to(device, dtype)
    bias = torch.randn(40).to(device, dtype)
    batched = batch_invariant_matmul(x, weight, bias)
    # The interpreter multiplies with numpy, whose rounding depends on the position in the tile.
    for row in (0, 128, *((77, 139) if ON_GPU else ())):
        assert torch.equal(batch_invariant_matmul(x[row : row + 1], weight, bias)[0], batched[row])
    assert torch.equal(batch_invariant_matmul(x[128:], weight, bias), batched[128:])
    # If there are many tiles, one program computes all K slices of a tile in order.
    monkeypatch.setattr(module, "are_few", lambda num_tiles: False)
    assert torch.equal(batch_invariant_matmul(x, weight, bias), batched)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_bmm_of_heads(device: torch.device, dtype: torch.dtype, transposed: bool) -> None:
    """Each head has its own weight, row-major or column-major; single rows are bitwise equal."""
    torch.manual_seed(1)
    x = torch.randn(70, 3, 1100).to(device, dtype)[:, :, :1030]
    weight = (torch.randn(3, 9, 1030) / 32).to(device, dtype)
    if transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    with poisoned_memory(), exact_products():
        found = batch_invariant_bmm(x, weight)
        for row in (0, 64):
            assert torch.equal(batch_invariant_bmm(x[row : row + 1], weight)[0], found[row])
    expected = batch_invariant_bmm_reference(x, weight)
    compare(
        found.transpose(0, 1), expected.transpose(0, 1), x.transpose(0, 1), weight.transpose(1, 2)
    )


def test_slices_depend_on_the_weight_shape_only() -> None:
    assert module.slicing(4096, 4096, module.HALF) == (512, 8)
    assert module.slicing(28672, 4096, module.HALF) == (2048, 2)
    assert module.slicing(152064, 4096, module.HALF) == (4096, 1)
    assert module.slicing(10, 100, module.HALF) == (128, 1)
    for inputs in (511, 513, 1600, 2880, 11008):
        size, count = module.slicing(2048, inputs, module.HALF)
        assert (count - 1) * size < inputs <= count * size


def test_a_row_with_nan_or_inf_does_not_affect_others(device: torch.device) -> None:
    x, weight = torch.randn(5, 40, device=device), torch.randn(9, 40, device=device)
    x[1], x[3, 0] = torch.nan, torch.inf
    finite = batch_invariant_matmul(x, weight).isfinite().all(-1)
    assert finite.tolist() == [True, False, True, False, True]


def test_no_rows(device: torch.device) -> None:
    none = torch.empty(0, 8, device=device)
    assert batch_invariant_matmul(none, torch.randn(3, 8, device=device)).shape == (0, 3)


def test_invalid_arguments_are_refused(device: torch.device) -> None:
    x, weight = torch.randn(2, 8, device=device), torch.randn(3, 8, device=device)
    with pytest.raises(ValueError, match="weight has shape"):
        batch_invariant_matmul(x, weight[:, 1:])
    with pytest.raises(ValueError, match=r"weight has dtype .*: expected float32"):
        batch_invariant_matmul(x, weight.half())
    with pytest.raises(ValueError, match="bias has shape"):
        batch_invariant_matmul(x, weight, torch.zeros(2, device=device))
    with pytest.raises(ValueError, match=r"x has stride .* in the last dimension"):
        batch_invariant_matmul(x.T.contiguous().T, weight)
