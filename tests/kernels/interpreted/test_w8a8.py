"""The Triton kernels of products of quantized activations (W8A8)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.checks import E4M3
from penstock.kernels.linear.code_kinds import FP8_GROUP_INPUTS
from penstock.kernels.linear.quantize_rows import ZERO_POINT, quantize_per_token
from penstock.kernels.linear.quantize_weights import quantize_weight
from penstock.kernels.linear.quantized import QuantizedMatrix, even_groups
from penstock.kernels.linear.w8a8 import (
    MAX_INT8_INPUTS,
    Form,
    W8A8Linear,
    dequantize,
    has_w8a8_products,
    pack_w8a8,
    quantize_activations,
    quantize_activations_reference,
    w8a8_matmul,
    w8a8_matmul_reference,
)
from tests.support.devices import DEVICE, DTYPES, ON_GPU, exact_products
from tests.support.poison import poisoned_memory

FORMS: tuple[Form, ...] = ("int8", "fp8")
CASES: list[tuple[Form, bool]] = [("int8", False), ("fp8", False), ("fp8", True)]
"""(form, whether there are groups of 128 inputs) of each kind of product."""

SHAPES = [(1, 1, 1), (3, 70, 130), (16, 33, 128), (17, 64, 300), (70, 33, 256), (130, 140, 388)]
"""(rows, outputs, inputs): several tiles, and sizes that are not multiples of a tile."""


@pytest.fixture(autouse=True)
def _units() -> None:
    if not all(has_w8a8_products(form, DEVICE) for form in FORMS):
        pytest.skip("the GPU has no tensor cores for FP8")


def group_size(inputs: int, has_groups: bool) -> int:
    return FP8_GROUP_INPUTS if has_groups else inputs


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 5),
    inputs=st.integers(1, 5000),
    form=st.sampled_from(FORMS),
    has_groups=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    limit=st.sampled_from([0.0, 0.02, 3.0]),
)
def test_activations_have_the_codes_and_scales_of_the_reference(
    device: torch.device,
    seed: int,
    rows: int,
    inputs: int,
    form: Form,
    has_groups: bool,
    dtype: torch.dtype,
    limit: float,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, inputs + 3, generator=generator) * torch.logspace(-3, 3, rows)[:, None]
    x = x.to(dtype)[:, :inputs]
    x[torch.rand(rows, inputs, generator=generator) < 0.1] = 0
    size = group_size(inputs, has_groups)
    with poisoned_memory():
        codes, scales = quantize_activations(x.to(device), form, size, limit)
    # The reference runs on the CPU, because torch divides by a number differently on a GPU: it
    # multiplies by the reciprocal of the number.
    expected, expected_scales = quantize_activations_reference(x, form, size, limit)
    assert codes.dtype == expected.dtype
    assert torch.equal(scales.cpu(), expected_scales)
    assert torch.equal(codes.cpu().view(torch.uint8), expected.view(torch.uint8))


def test_int8_activations_are_rounded_as_on_a_cpu(device: torch.device) -> None:
    x = torch.randn(9, 700) * torch.logspace(-20, 20, 9)[:, None]
    x[4] = 0
    codes, scales = quantize_activations(x.to(device), "int8", 700)
    expected, expected_scales = quantize_per_token(x)
    assert torch.equal(codes.cpu().int(), expected.int() - ZERO_POINT)
    assert torch.equal(scales.cpu(), expected_scales)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "has_groups"), CASES)
@pytest.mark.parametrize("shape", SHAPES)
def test_product_is_within_the_rounding_of_its_sums(
    device: torch.device,
    shape: tuple[int, int, int],
    form: Form,
    has_groups: bool,
    dtype: torch.dtype,
) -> None:
    rows, outputs, inputs = shape
    torch.manual_seed(rows)
    size = group_size(inputs, has_groups)
    x, x_scales = quantize_activations_reference(torch.randn(rows, inputs), form, size)
    weight, scales = quantize_activations_reference(torch.randn(outputs, inputs), form, size)
    scales = scales.T.contiguous()
    bias = torch.randn(outputs).to(dtype) if rows > 1 else None
    on_device = [each.to(device) for each in (x, x_scales, weight, scales)]
    with poisoned_memory():
        found = w8a8_matmul(
            on_device[0], on_device[1], on_device[2], on_device[3],
            None if bias is None else bias.to(device), dtype=dtype,
        ).cpu()  # fmt: skip
    assert found.dtype == dtype
    expected = w8a8_matmul_reference(x, x_scales, weight, scales, bias)
    sums = dequantize(x, x_scales).abs() @ dequantize(weight, scales.T).abs().T
    if bias is not None:
        sums += bias.double().abs()
    # The bound counts roundings to float32. Both forms round the sum, its products with two scales,
    # and the sum with the bias. FP8 also rounds the 128 additions of
    # each tile, and the additions of the tiles.
    steps = 4 if form == "int8" else 4 + FP8_GROUP_INPUTS + -(-inputs // FP8_GROUP_INPUTS)
    bound = steps * 2.0**-24 * sums + torch.finfo(dtype).eps / 2 * expected.abs()
    if ON_GPU and form == "fp8":
        bound += tensor_core_error(x, x_scales, weight, scales)
    assert ((found.double() - expected).abs() <= 1.01 * bound + 1e-30).all()


def tensor_core_error(x: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """Return a bound [T, N] of the error of sums of FP8 products in tensor cores.

    A tensor core keeps about 14 bits of a sum (DeepSeek-V3 technical report, 3.3.2): an instruction
    aligns 32 products and the previous sum to the largest of them, and drops bits of each that are
    below 2^-13 of it. A tile of 128 inputs has four instructions.
    """
    factors = dequantize(x, x_scales)[:, None], dequantize(weight, scales.T)[None]
    bound = torch.zeros(len(x), len(weight), dtype=torch.float64)
    for first in range(0, x.shape[1], FP8_GROUP_INPUTS):
        part = slice(first, first + FP8_GROUP_INPUTS)
        terms = factors[0][..., part] * factors[1][..., part]
        largest = torch.maximum(terms.abs().amax(2), terms.cumsum(2).abs().amax(2))
        # The factor 2: the exponents of a product's factors may be one more than the product's.
        bound += 2 * 4 * 33 * 2.0**-13 * largest
    return bound


@pytest.mark.parametrize(("form", "has_groups"), CASES)
@settings(deadline=None, max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(0, 140),
    outputs=st.integers(0, 140),
    inputs=st.integers(1, 500),
)
def test_products_that_need_no_rounding_are_exact(
    device: torch.device,
    form: Form,
    has_groups: bool,
    seed: int,
    rows: int,
    outputs: int,
    inputs: int,
) -> None:
    """Sums of 128 products are below 2^10, so even 14 bits hold them; scales are powers of two."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.int8 if form == "int8" else E4M3
    num_groups = -(-inputs // FP8_GROUP_INPUTS) if has_groups else 1

    def integers(most: int, *shape: int) -> Tensor:
        return torch.randint(-most, most + 1, shape, generator=generator).float()

    x, weight = integers(2, rows, inputs).to(dtype), integers(3, outputs, inputs).to(dtype)
    x_scales, scales = 2 ** integers(2, rows, num_groups), 2 ** integers(2, num_groups, outputs)
    bias = integers(9, outputs)
    on_device = (each.to(device) for each in (x, x_scales, weight, scales, bias))
    found = w8a8_matmul(*on_device, dtype=torch.float32).cpu()
    expected = w8a8_matmul_reference(x, x_scales, weight, scales, bias)
    assert torch.equal(found, expected.float())


@pytest.mark.parametrize("form", FORMS)
def test_many_rows_are_computed_in_several_bands_of_tiles(device: torch.device, form: Form) -> None:
    rows, outputs = 9 * 128 + 1, 2 * 128 + 1  # 10 row tiles: bands of 8 and 2
    dtype = torch.int8 if form == "int8" else E4M3
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randint(-2, 3, (count, 5), generator=generator).float().to(dtype)
        for count in (rows, outputs)
    )
    ones = torch.ones(rows, 1), torch.ones(1, outputs)
    with poisoned_memory():
        found = w8a8_matmul(
            x.to(device), ones[0].to(device), weight.to(device), ones[1].to(device),
            dtype=torch.float32,
        )  # fmt: skip
    assert torch.equal(found.cpu(), x.float() @ weight.float().T)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("form", "has_groups"), CASES)
def test_row_bits_do_not_depend_on_the_batch(
    device: torch.device, form: Form, has_groups: bool, dtype: torch.dtype
) -> None:
    """Batches of 1, 16, 17, 64, 65 and more rows have tiles of different sizes."""
    torch.manual_seed(0)
    size = group_size(300, has_groups)
    x = torch.randn(80, 300).to(device, dtype)
    weight, scales = quantize_activations_reference(torch.randn(40, 300), form, size)
    bias = torch.randn(40).to(device, dtype)
    layer = W8A8Linear(form, weight.to(device), scales.T.contiguous().to(device), bias)
    with exact_products():
        whole = layer(x)
        for first, count in ((0, 1), (79, 1), (3, 16), (9, 17), (16, 64), (5, 65)):
            part = slice(first, first + count)
            assert torch.equal(layer(x[part]), whole[part]), (first, count)


@pytest.mark.parametrize(("form", "has_groups"), CASES)
def test_a_row_with_nan_or_inf_is_not_finite_and_does_not_affect_others(
    device: torch.device, form: Form, has_groups: bool
) -> None:
    weight, scales = quantize_activations_reference(
        torch.randn(9, 300), form, group_size(300, has_groups)
    )
    layer = W8A8Linear(form, weight.to(device), scales.T.contiguous().to(device), None)
    x = torch.randn(6, 300, device=device)
    x[1, 290], x[3, 0], x[4, 299] = torch.nan, torch.inf, -torch.inf
    finite = layer(x).isfinite()
    assert finite.all(1).tolist() == finite.any(1).tolist()
    assert finite.all(1).tolist() == [True, False, True, False, False, True]


@pytest.mark.parametrize("form", FORMS)
def test_quantized_weights_are_packed_without_a_copy(device: torch.device, form: Form) -> None:
    weight, x = torch.randn(70, 200), torch.randn(20, 200)
    matrix = quantize_weight(weight.to(device), form)
    expected = matrix.dequantize().cpu()
    layer = pack_w8a8(matrix, None, form)
    assert layer is not None
    assert layer.weight.data_ptr() == matrix.codes.data_ptr()
    found = layer(x.to(device)).cpu()
    # The rounding of activations is the largest error of the product.
    codes, scales = quantize_activations_reference(x, form, 200)
    exact = dequantize(codes, scales) @ expected.double().T
    assert (found - exact).norm() < (1e-5 if form == "int8" or not ON_GPU else 2e-3) * exact.norm()
    plain = x.double() @ weight.double().T
    assert (found - plain).norm() < 0.06 * plain.norm()


def fp8_matrix(groups: Tensor, num_groups: int, device: torch.device) -> QuantizedMatrix:
    tensors = (
        torch.ones(4, len(groups)).to(E4M3).view(torch.uint8),
        torch.ones(4, num_groups),
        torch.empty(4, 0, dtype=torch.uint8),
        groups,
    )
    return QuantizedMatrix("fp8", *(each.to(device) for each in tensors))


def test_only_weights_with_scales_of_the_kernel_are_packed(device: torch.device) -> None:
    host = torch.device("cpu")
    for inputs, size, is_packed in ((300, 128, True), (300, 300, True), (128, 64, False)):
        matrix = fp8_matrix(even_groups(inputs, size, host), -(-inputs // size), device)
        assert (pack_w8a8(matrix, None, "fp8") is not None) == is_packed, size
        assert pack_w8a8(matrix, None, "int8") is None
        assert pack_w8a8(matrix, None, "") is None
    shuffled = even_groups(256, 128, host).flip(0)
    assert pack_w8a8(fp8_matrix(shuffled, 2, device), None, "fp8") is None
    matrix = quantize_weight(torch.randn(4, 64, device=device), "int8")
    matrix.zeros[2] = 127
    assert pack_w8a8(matrix, None, "int8") is None


def test_longest_int8_sum_does_not_overflow(device: torch.device) -> None:
    x = torch.full((1, MAX_INT8_INPUTS), 127, dtype=torch.int8, device=device)
    weight = torch.full((1, MAX_INT8_INPUTS), -128, dtype=torch.int8, device=device)
    one = torch.ones(1, 1, device=device)
    found = w8a8_matmul(x, one, weight, one, dtype=torch.float32)
    assert found.item() == -127.0 * 128 * MAX_INT8_INPUTS
    assert 127 * 128 * (MAX_INT8_INPUTS + 1) > 2**31 - 1


def test_invalid_arguments_are_refused(device: torch.device) -> None:
    x = torch.randn(2, 300, device=device)
    with pytest.raises(ValueError, match="group_size is 64: expected 128"):
        quantize_activations(x, "fp8", 64)
    with pytest.raises(ValueError, match="x has 0 input features"):
        quantize_activations(x[:, :0], "fp8", 64)
    codes, scales = quantize_activations(x, "fp8", 300)
    many = torch.ones(2, 2, device=device)
    with pytest.raises(ValueError, match="x_scales has 2 groups: expected 1 or 3"):
        w8a8_matmul(codes, many, codes, many, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"dtype is .*: expected float32"):
        w8a8_matmul(codes, scales, codes, scales.T.contiguous(), dtype=torch.int32)
