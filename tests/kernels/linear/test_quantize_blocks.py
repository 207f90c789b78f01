"""Quantization of activations by blocks: equal to the reference, and independent of other rows."""

import pytest
import torch

from penstock.kernels.cpu_common.numba_runtime import has_numba
from penstock.kernels.linear import quantize_blocks
from penstock.kernels.linear.quantize_blocks import (
    QuantizedBlocks,
    quantize_per_block,
    quantize_per_block_reference,
)
from tests.support.threads import threads

pytestmark = pytest.mark.skipif(not has_numba(), reason="needs numba")
SHAPES = [(1, 8), (3, 256), (5, 264), (2, 776), (70, 512)]


def check_equal(ours: QuantizedBlocks, expected: QuantizedBlocks) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("run", [8, 32, 256])
def test_values_scales_and_offsets_are_those_of_the_reference(
    shape: tuple[int, int], run: int
) -> None:
    x = torch.randn(shape) * torch.rand(shape).mul(6).exp()
    check_equal(quantize_per_block(x, run), quantize_per_block_reference(x, run))


def test_largest_value_of_a_block_is_127_and_a_block_of_zeros_is_zero() -> None:
    x = torch.zeros(1, 512)
    x[0, 3], x[0, 4] = -2.54, 1.27
    found = quantize_per_block(x, 256)
    assert found.qvalues[0, 3:5].tolist() == [-127, 64]
    assert found.scales[0, 0].item() == pytest.approx(0.02)
    assert not found.qvalues[0, 256:].any()
    assert found.offsets.tolist() == [[63, 0]]


def test_row_does_not_depend_on_other_rows_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_blocks, "MIN_PARALLEL_ELEMENTS", 0)
    x = torch.randn(20, 520)
    expected = quantize_per_block(x, 32)
    for num_threads in (1, 3):
        with threads(num_threads):
            rows = quantize_per_block(x[7:12], 32)
        check_equal(rows, QuantizedBlocks(*(each[7:12] for each in expected)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_scale_of_a_block_with_nan_or_infinity_is_not_finite(value: float) -> None:
    x = torch.ones(2, 512)
    x[1, 300] = value
    finite = quantize_per_block(x, 64).scales.isfinite()
    assert finite.tolist() == [[True, True], [True, False]]
