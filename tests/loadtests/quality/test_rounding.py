"""Weight rounding for the quality table: published formats, and the gain from calibration."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.loadtests.quality.features import FORMS, W8A8, product_errors
from penstock.loadtests.quality.rounding import Rounded, clipped, gptq, nf4, q4_k, q6_k


def random_weight() -> Tensor:
    return torch.randn(48, 512, generator=torch.Generator().manual_seed(1))


def correlated_features() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    inner = torch.randn(600, 64, generator=generator)
    features: Tensor = (inner @ torch.randn(64, 512, generator=generator)).double()
    return features


@pytest.mark.parametrize("round_matrix", [nf4, q4_k, q6_k])
def test_weights_are_within_half_a_step(round_matrix: Callable[[Tensor], Rounded]) -> None:
    """Scales are rounded too, so errors may exceed half a step."""
    weight = random_weight()
    found = round_matrix(weight)
    outside = (found.weight - weight).abs() > 1.5 * found.half_steps
    assert float(outside.double().mean()) < 0.02


def test_zero_matrices_stay_zero() -> None:
    for round_matrix in (q4_k, q6_k):
        assert not bool(round_matrix(torch.zeros(2, 256)).weight.any())


def test_gptq_changes_outputs_less_than_rounding() -> None:
    weight, x = random_weight(), correlated_features()
    hessian = x[:300].T @ x[:300] / 300
    errors = [
        (x[300:] @ (found.weight - weight).double().T).square().mean()
        for found in (gptq(weight, hessian), gptq(weight, torch.eye(512)))
    ]
    assert float(errors[0]) < 0.7 * float(errors[1])


def test_clipped_ranges_are_better_than_whole_ones() -> None:
    weight = random_weight()
    importance = torch.ones(512)
    importance[:8] = 100
    found = clipped(weight, importance).weight
    whole = gptq(weight, torch.eye(512)).weight  # the identity as Hessian gives plain rounding
    costs = [float(((each - weight).square() * importance).sum()) for each in (found, whole)]
    assert costs[0] < costs[1]


def test_errors_of_products_are_near_the_bounds() -> None:
    errors = product_errors()
    assert errors.keys() == FORMS.keys() | W8A8.keys()
    assert all(0.5 < each.of_bound < 1.1 for each in errors.values())
    assert errors["GPTQ"].of_bound < 0.8
    for both in W8A8:
        assert errors[both].relative > errors[both.split(",")[0]].relative
    assert errors["int8"].relative < errors["fp8"].relative < errors["int4"].relative
