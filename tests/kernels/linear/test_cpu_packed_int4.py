"""Products of 4-bit weights and INT8 activations: error bounds, and batch invariance."""

import pytest
import torch

from penstock.kernels.linear import cpu_packed_int4, quantized
from penstock.kernels.linear.cpu_packed_int4 import (
    PackedLinearInt4,
    has_int4_loops,
    supported_group,
)
from penstock.kernels.linear.int8_blocks import BLOCK_INPUTS
from penstock.kernels.linear.quantize_blocks import quantize_per_block_reference
from penstock.kernels.linear.quantized import (
    DequantizingLinear,
    QuantizedMatrix,
    even_groups,
    pack_quantized,
)
from tests.support.threads import threads

pytestmark = pytest.mark.skipif(not has_int4_loops(), reason="needs AVX2 or AVX-512 VNNI")

SHAPES = [
    (1, 32, 32), (47, 96, 32), (48, 384, 128), (100, 264, 8), (49, 776, 64), (60, 520, 256),
    (145, 1536, 512), (50, 200, 200), (30, 584, 584),
]  # fmt: skip
"""(outputs, inputs, inputs per group) of each matrix. A block has 256 inputs, and a panel has 48
outputs."""

ROWS = (0, 1, 2, 3, 5, 7, 8, 9, 65, 150)
"""Numbers of input rows. Tiles have 1, 2, 4, 6 or 8 rows, and a block of rows has 64."""


def matrix(outputs: int, inputs: int, size: int) -> QuantizedMatrix:
    """Return random 4-bit weights; the last group of a row may be shorter than `size`."""
    count = -(-inputs // size)
    return QuantizedMatrix(
        "int4", torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8),
        torch.rand(outputs, count) + 0.1,
        torch.randint(0, 16, (outputs, count), dtype=torch.uint8),
        even_groups(inputs, size, torch.device("cpu")),
    )  # fmt: skip


def packed(given: QuantizedMatrix, bias: torch.Tensor | None = None) -> PackedLinearInt4:
    found = pack_quantized(given, bias, torch.float32, int8_activations=True)
    assert isinstance(found, PackedLinearInt4)
    return found


def exact_product(
    x: torch.Tensor, given: QuantizedMatrix, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the product with quantized activations in float64, and a bound of our error.

    A run is a range of inputs in one group and one block. The integer sum of a run is exact. Each
    product of a weight and an activation then takes part in float32 operations: at most one
    addition for each run and for each block of inputs, two multiplications, and the addition of the
    bias. The unit roundoff of float32 is u.
    """
    quantized_x = quantize_per_block_reference(x, BLOCK_INPUTS)
    scales = quantized_x.scales.double().repeat_interleave(BLOCK_INPUTS, 1)[:, : x.shape[1]]
    values = quantized_x.qvalues.double() * scales
    codes = torch.stack((given.codes & 15, given.codes >> 4), -1).view(len(given.codes), -1)
    groups = given.groups.long()
    weight = (codes.double() - given.zeros[:, groups]) * given.scales[:, groups].double()
    count, u = given.scales.shape[1] + 2 * scales.shape[1] + 3, 2.0**-24
    # The error of each float32 operation is at most u times the sum of the terms' absolute values.
    magnitude = values.abs() @ weight.abs().T + bias.double().abs()
    return values @ weight.T + bias.double(), magnitude * (count * u / (1 - count * u))


@pytest.mark.parametrize("shape", SHAPES)
def test_product_is_within_the_bound_of_its_float32_operations(
    shape: tuple[int, int, int],
) -> None:
    given, bias = matrix(*shape), torch.randn(shape[0])
    product = packed(given, bias)
    for rows in ROWS:
        x = torch.randn(rows, shape[1])
        expected, bound = exact_product(x, given, bias)
        found = product(x)
        assert found.shape == (rows, shape[0])
        assert found.is_contiguous()
        assert ((found.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("size", [32, 1024])
def test_error_of_quantized_activations_is_bounded(size: int) -> None:
    """An activation has an error of at most step / 2, so a product has at most step / 2 x |W|."""
    given = matrix(70, 1024, size)
    x, bias = torch.randn(9, 1024) * torch.rand(9, 1024).mul(4).exp(), torch.zeros(70)
    weight = given.dequantize().double()
    _, rounding = exact_product(x, given, bias)
    steps = quantize_per_block_reference(x, 32).scales.double().repeat_interleave(BLOCK_INPUTS, 1)
    # The quotient x / step is first rounded to a float32 and then to an integer. The factor
    # 1 + 1e-4 covers the first rounding.
    bound = (steps / 2 * (1 + 1e-4)) @ weight.abs().T + rounding
    assert ((packed(given)(x).double() - x.double() @ weight.T).abs() <= bound).all()


@pytest.mark.parametrize("shape", [(145, 776, 32), (60, 1024, 128)])
def test_row_bits_are_the_same_for_any_rows_and_threads(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_packed_int4, "MIN_PARALLEL_MACS", 0)
    product = packed(matrix(*shape))
    x = torch.randn(70, shape[1])
    whole = product(x)
    for num_threads, (first, last) in (
        (1, (0, 1)), (2, (3, 5)), (3, (4, 8)), (1, (5, 11)), (2, (7, 15)), (3, (1, 66)),
    ):  # fmt: skip
        with threads(num_threads):
            assert torch.equal(product(x[first:last]), whole[first:last])


def test_nan_of_an_activation_or_a_scale_reaches_only_its_row_or_output() -> None:
    given, x = matrix(60, 512, 64), torch.randn(10, 512)
    x[4, 300] = torch.nan
    given.scales[50, 3] = torch.nan
    is_nan = packed(given)(x).isnan()
    expected = torch.zeros(10, 60, dtype=torch.bool)
    expected[4] = expected[:, 50] = True
    assert torch.equal(is_nan, expected)


@pytest.mark.parametrize(
    ("inputs", "size", "expected"),
    [
        (64, 32, 32), (64, 64, 256), (768, 768, 768), (776, 1000, 1024), (1024, 512, 512),
        (512, 8, 8), (512, 256, 256), (100, 50, None), (96, 48, None), (768, 384, None),
        (512, 4, None),
    ],
)  # fmt: skip
def test_groups_are_supported_if_they_divide_blocks_or_are_whole_blocks(
    inputs: int, size: int, expected: int | None
) -> None:
    assert supported_group(inputs, size) == expected
    given = matrix(5, inputs, size)
    kind = DequantizingLinear if expected is None else PackedLinearInt4
    assert isinstance(pack_quantized(given, None, torch.float32, True), kind)


def test_act_order_and_incomplete_first_groups_keep_float_activations() -> None:
    given = matrix(5, 128, 32)
    shuffled = given.groups[torch.randperm(128)]
    for groups in (shuffled, (torch.arange(128, dtype=torch.int32) + 16) // 32):
        count = int(groups.max()) + 1
        other = QuantizedMatrix(
            "int4", given.codes, torch.rand(5, count), torch.zeros(5, count, dtype=torch.uint8),
            groups,
        )  # fmt: skip
        assert isinstance(pack_quantized(other, None, torch.float32, True), DequantizingLinear)


def test_cpu_without_vnni_keeps_float_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "has_int4_loops", lambda: False)
    found = pack_quantized(matrix(5, 64, 32), None, torch.float32, True)
    assert isinstance(found, DequantizingLinear)


def test_input_of_another_shape_or_dtype_is_refused() -> None:
    product = packed(matrix(8, 64, 32))
    for x in (torch.zeros(2, 63), torch.zeros(64), torch.zeros(2, 64, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"x has shape .*: expected \[T, 64\] float32"):
            product(x)


def test_weight_only_products_keep_float_activations() -> None:
    found = pack_quantized(matrix(5, 64, 32), None, torch.float32)
    assert isinstance(found, DequantizingLinear)
