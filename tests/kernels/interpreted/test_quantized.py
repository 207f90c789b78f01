"""The Triton kernel of weight-only products."""

import pytest
import torch

from penstock.kernels.linear.quantized import (
    Kind,
    QuantizedMatrix,
    TritonQuantizedLinear,
    even_groups,
    has_zeros,
    is_narrow,
    pack_quantized,
)
from penstock.kernels.triton_common.tuned_tiles import trial_tiles
from tests.support.devices import DTYPES
from tests.support.poison import poisoned_memory

KINDS: tuple[Kind, ...] = ("int4", "int8", "fp8", "e2m1", "nf4", "fp4")
SHAPES = [(1, 1, 64, 64), (3, 70, 130, 26), (17, 64, 256, 128), (70, 33, 192, 192)]
"""(rows, outputs, inputs, inputs per group) of each product."""


def matrix(
    kind: Kind, outputs: int, inputs: int, size: int, act_order: bool, device: torch.device
) -> QuantizedMatrix:
    groups = even_groups(inputs, size, torch.device("cpu"))
    if act_order:
        groups = groups[torch.randperm(inputs)]
    count, width = inputs // size, inputs // 2 if is_narrow(kind) else inputs
    codes = torch.randint(0, 256, (outputs, width), dtype=torch.uint8)
    zeros = torch.randint(0, 16, (outputs, count), dtype=torch.uint8)
    if kind == "fp8":
        codes[codes & 127 == 127] = 3  # replaces codes that are NaN
    if not has_zeros(kind):
        zeros = zeros[:, :0]
    scales = torch.rand(outputs, count) + 0.1
    parts = (each.to(device) for each in (codes, scales, zeros, groups))
    return QuantizedMatrix(kind, *parts)


TUNED = {"rows": 32, "outputs": 32, "inputs": 32, "num_warps": 8, "num_stages": 2}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act_order", [False, True])
def test_product_is_within_the_rounding_of_its_operands(
    device: torch.device, dtype: torch.dtype, kind: Kind, act_order: bool
) -> None:
    for shape in SHAPES:
        check_product(shape, device, dtype, kind, act_order)


@pytest.mark.parametrize("kind", ["int4", "fp8"])
@pytest.mark.parametrize("act_order", [False, True])
def test_product_with_other_tiles(device: torch.device, kind: Kind, act_order: bool) -> None:
    with trial_tiles("linear.weight_only", TUNED):
        for shape in SHAPES[1:3]:
            check_product(shape, device, torch.float32, kind, act_order)


def check_product(
    shape: tuple[int, int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    kind: Kind,
    act_order: bool,
) -> None:
    rows, outputs, inputs, size = shape
    torch.manual_seed(rows)
    given = matrix(kind, outputs, inputs, size, act_order, device)
    x = torch.randn(rows, 2 * inputs).to(device, dtype)[:, :inputs] / 64
    bias = torch.randn(outputs).to(device, dtype) if rows > 1 else None
    product = pack_quantized(given, bias, dtype)
    assert isinstance(product, TritonQuantizedLinear)
    assert product.one_group == (not act_order and size % 64 == 0) or size == inputs
    with poisoned_memory():
        found = product(x)
    weight = given.dequantize().double()
    expected = x.double() @ weight.T
    sizes = x.double().abs() @ weight.abs().T
    if bias is not None:
        expected, sizes = expected + bias.double(), sizes + bias.double().abs()
    # Bound: weights and the result are each rounded by half a unit of `dtype`; sums are float32.
    unit = torch.finfo(dtype).eps / 2
    bound = (2.01 * unit + (inputs + 3) * 2.0**-24) * sizes
    assert found.dtype == dtype
    assert ((found.double() - expected).abs() <= bound).all()


def test_every_fp8_code_has_its_value(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(256, 1)
    codes = torch.cat((codes, torch.zeros_like(codes)), 1)
    ones, none = torch.ones(256, 1, device=device), torch.zeros(256, 0, dtype=torch.uint8)
    given = QuantizedMatrix(
        "fp8", codes, ones, none.to(device), torch.zeros(2, dtype=torch.int32, device=device)
    )
    x = torch.tensor([[1.0, 0.0]], device=device)
    found = pack_quantized(given, None, torch.float32)(x)[0]
    expected = codes[:, 0].contiguous().view(torch.float8_e4m3fn).float()
    assert torch.equal(found.nan_to_num(999.0), expected.nan_to_num(999.0))


@pytest.mark.parametrize("kind", ["e2m1", "nf4", "fp4"])
def test_every_code_of_4_bits_has_the_value_of_its_table(device: torch.device, kind: Kind) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device).view(256, 1)
    ones, none = torch.ones(256, 1, device=device), torch.zeros(256, 0, dtype=torch.uint8)
    groups = torch.zeros(2, dtype=torch.int32, device=device)
    given = QuantizedMatrix(kind, codes, ones, none.to(device), groups)
    found = pack_quantized(given, None, torch.float32)(torch.eye(2, device=device))
    assert torch.equal(found.T, given.dequantize())
