"""Quantization of float weights: rounding, division of inputs among ranks, special values."""

import numpy as np
import pytest
import torch

from penstock.kernels.linear.quantize_weights import WEIGHT_FORMS, WeightForm, quantize_weight
from tests.support.rounded import ROUNDED


def weights(rows: int, columns: int) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=numbers) * torch.rand(rows, 1, generator=numbers)


@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize("shape", [(3, 64), (300, 32), (5, 70), (7, 2)])
def test_weights_are_those_of_plain_rounding(form: WeightForm, shape: tuple[int, int]) -> None:
    weight = weights(*shape)
    matrix = quantize_weight(weight, form)
    assert matrix.shape == shape
    assert torch.equal(matrix.dequantize(), ROUNDED[form](weight))


@pytest.mark.parametrize(("form", "bound"), [("int8", 1 / 254), ("fp8", 1 / 16), ("int4", 1 / 15)])
def test_errors_are_bounded(form: WeightForm, bound: float) -> None:
    weight = weights(64, 96)
    error = (quantize_weight(weight, form).dequantize() - weight).abs()
    # FP8 rounds by half a unit of its third mantissa bit, or by half of the smallest subnormal.
    if form == "fp8":
        smallest = weight.abs().amax(1, keepdim=True) / 448 * 2**-10
        assert bool((error <= torch.maximum(bound * weight.abs(), smallest) * 1.0001).all())
    else:
        assert bool((error <= bound * weight.abs().amax(1, keepdim=True) * 1.0001).all())


@pytest.mark.parametrize("form", WEIGHT_FORMS)
def test_zero_rows_and_zero_weights_stay_zero(form: WeightForm) -> None:
    weight = weights(4, 64)
    weight[1] = 0
    weight[2, 32:] = 0
    weight[3, ::3] = 0
    found = quantize_weight(weight, form).dequantize()
    assert bool((found[weight == 0] == 0).all())


@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_special_values_are_not_hidden(form: WeightForm, value: float) -> None:
    weight = weights(3, 64)
    weight[1, 5] = value
    found = quantize_weight(weight, form).dequantize()
    assert not bool(found[1, 5].isfinite())
    assert bool(found[[0, 2]].isfinite().all())


@pytest.mark.parametrize("form", WEIGHT_FORMS)
@pytest.mark.parametrize(("first", "last"), [(0, 96), (0, 48), (48, 96), (10, 30), (7, 41)])
def test_inputs_are_cut_anywhere(form: WeightForm, first: int, last: int) -> None:
    matrix = quantize_weight(weights(5, 96), form)
    part = matrix.take_inputs(first, last)
    assert part.shape == (5, last - first)
    assert torch.equal(part.dequantize(), matrix.dequantize()[:, first:last])
    assert part.scales.shape[1] == np.unique(matrix.groups[first:last].numpy()).size
