"""Weight-only products: within the error bound of float32 sums, and batch-invariant."""

from collections.abc import Callable

import pytest
import torch

from penstock.kernels.cpu_common.cpu_features import has_avx2
from penstock.kernels.linear import quantized
from penstock.kernels.linear.quantized import (
    DequantizingLinear,
    Kind,
    QuantizedMatrix,
    TiledLinear,
    concatenate,
    even_groups,
    has_zeros,
    is_narrow,
    pack_quantized,
)
from tests.support.threads import threads

CPU = torch.device("cpu")
KINDS: tuple[Kind, ...] = ("int4", "int8", "fp8", "e2m1", "nf4", "fp4")
TABLES: dict[Kind, list[float]] = {
    "nf4": [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ],
    "fp4": [
        sign * value / 192 for sign in (1, -1) for value in (0, 1, 128, 192, 64, 96, 32, 48)
    ],
}  # fmt: skip
"""Values of the codes of bitsandbytes."""

SHAPES = [(1, 32, 32), (47, 96, 32), (48, 384, 128), (49, 200, 100), (145, 578, 289)]
"""(outputs, inputs, inputs per group) of each matrix. A block of weights has 256 inputs and 48
outputs."""
ROWS = (0, 1, 2, 3, 5, 7, 8, 9, 65, 300)
"""Numbers of input rows. Tiles have 1, 2, 4, 6 or 8 rows, and a block of rows has 64."""


def matrix(kind: Kind, outputs: int, inputs: int, size: int, act_order: bool) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(outputs)
    groups = even_groups(inputs, size, CPU)
    if act_order:
        groups = groups[torch.randperm(inputs, generator=generator)]
    count = inputs // size
    width = inputs // 2 if is_narrow(kind) else inputs
    codes = torch.randint(0, 256, (outputs, width), dtype=torch.uint8, generator=generator)
    zeros = torch.randint(0, 16, (outputs, count), dtype=torch.uint8, generator=generator)
    if kind == "fp8":
        codes[codes & 127 == 127] = 3  # replaces codes that are NaN
    if not has_zeros(kind):
        zeros = zeros[:, :0]
    scales = torch.rand(outputs, count, generator=generator) + 0.1
    return QuantizedMatrix(kind, codes, scales, zeros, groups)


def e4m3(code: int) -> float:
    """Return the value of an FP8 (E4M3) code, from the definition of the format."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if code & 128 else size


def e2m1(code: int) -> float:
    """Return the value of an E2M1 code (MXFP4, NVFP4), from the definition of the format."""
    exponent, mantissa = code >> 1 & 3, code & 1
    size = mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2)
    return -size if code & 8 else size


def value_of(kind: Kind, code: int) -> float:
    """Return the value of a 4-bit code, computed in float32."""
    if kind == "e2m1":
        return e2m1(code)
    return float(torch.tensor(TABLES[kind][code], dtype=torch.float32))


def weights(given: QuantizedMatrix) -> torch.Tensor:
    """Dequantize all weights one by one, in float64."""
    outputs, inputs = given.shape
    groups = given.groups.tolist()
    result = torch.zeros(outputs, inputs, dtype=torch.float64)
    for n in range(outputs):
        codes, scales, zeros = given.codes[n].tolist(), given.scales[n].tolist(), given.zeros[n]
        for k, group in enumerate(groups):
            code = codes[k // 2] >> 4 * (k % 2) & 15 if is_narrow(given.kind) else codes[k]
            if given.kind == "fp8":
                value = e4m3(code)
            elif has_zeros(given.kind):
                value = code - int(zeros[group])
            else:
                value = value_of(given.kind, code)
            result[n, k] = value * scales[group]
    return result


def bound(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Bound the error of float32 sums in any order, with weights rounded to float32.

    A sum of K products and a bias has K + 1 terms; u = 2^-24 is the unit roundoff. The error factor
    of a term is at most (1 + u)^(K + 3): the weight is rounded, the product is rounded, and the
    term takes part in at most K + 1 rounded sums.
    """
    u = 2.0**-24
    count = weight.shape[1] + 3
    return (x.double().abs() @ weight.abs().T + bias.abs()) * (count * u / (1 - count * u))


def tiled(given: QuantizedMatrix, bias: torch.Tensor, dtype: torch.dtype) -> TiledLinear:
    return TiledLinear(given, bias)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("pack", [tiled, pack_quantized])
def test_product_is_within_the_bound_of_float32_sums(
    kind: Kind, act_order: bool, pack: Callable[..., TiledLinear], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "TILE_WEIGHTS", 1000)
    for outputs, inputs, size in SHAPES:
        given, bias = matrix(kind, outputs, inputs, size, act_order), torch.randn(outputs)
        weight = weights(given)
        product = pack(given, bias, torch.float32)
        for rows in ROWS:
            x = torch.randn(rows, inputs)
            found = product(x)
            assert found.shape == (rows, outputs)
            assert found.is_contiguous()
            error = (found.double() - (x.double() @ weight.T + bias.double())).abs()
            assert (error <= bound(x, weight, bias.double())).all()


@pytest.mark.skipif(not has_avx2(), reason="needs AVX2")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act_order", [False, True])
def test_row_bits_are_the_same_for_any_rows_and_threads(kind: Kind, act_order: bool) -> None:
    """Groups of 34 inputs, and groups with act-order, end inside the steps of the loops."""
    product = pack_quantized(matrix(kind, 145, 578, 34, act_order), None, torch.float32)
    assert isinstance(product, DequantizingLinear)
    x = torch.randn(70, 578)
    whole = product(x)
    for num_threads, (first, last) in (
        (1, (0, 1)), (2, (3, 5)), (3, (4, 8)), (1, (5, 11)), (2, (7, 15)), (3, (1, 66)),
    ):  # fmt: skip
        with threads(num_threads), pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantized, "MIN_PARALLEL_MACS", 0)
            assert torch.equal(product(x[first:last]), whole[first:last])


@pytest.mark.parametrize("pack", [tiled, pack_quantized])
def test_fp8_codes_have_the_values_of_torch(
    pack: Callable[..., TiledLinear], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "TILE_WEIGHTS", 64)  # NaN codes are not in the first tile
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales, zeros = torch.ones(16, 1), torch.zeros(16, 0, dtype=torch.uint8)
    given = QuantizedMatrix("fp8", codes, scales, zeros, even_groups(16, 16, CPU))
    product = pack(given, None, torch.float32)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert [e4m3(code) for code in range(127)] == expected.flatten()[:127].tolist()
    for k in range(16):
        one = torch.zeros(1, 16)
        one[0, k] = 1
        column = expected[:, k]
        found = product(one)[0]
        # Compare only rows without NaN: a NaN weight makes the whole product of its row NaN.
        sound = ~expected.isnan().any(1)
        assert torch.equal(found[sound], column[sound])
        assert found[~sound].isnan().all()


def test_matrices_with_other_groups_are_not_fused() -> None:
    one, other = (matrix("int4", 8, 64, size, False) for size in (32, 64))
    assert concatenate([one, one]).shape == (16, 64)
    with pytest.raises(ValueError, match="different groups"):
        concatenate([one, other])


@pytest.mark.skipif(not has_avx2(), reason="needs AVX2")
def test_input_of_another_shape_or_dtype_is_refused() -> None:
    product = pack_quantized(matrix("int8", 8, 64, 32, False), None, torch.float32)
    for x in (torch.zeros(2, 63), torch.zeros(64), torch.zeros(2, 64, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"x has shape .*: expected \[T, 64\] float32"):
            product(x)


def test_bfloat16_activations_use_bounded_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    given = matrix("int4", 100, 64, 32, False)
    tiles = []
    dequantize = QuantizedMatrix.dequantize

    def watch(self: QuantizedMatrix, first: int, last: int) -> torch.Tensor:
        tiles.append(last - first)
        return dequantize(self, first, last)

    monkeypatch.setattr(quantized, "TILE_WEIGHTS", 640)
    monkeypatch.setattr(QuantizedMatrix, "dequantize", watch)
    product = pack_quantized(given, None, torch.bfloat16)
    assert product(torch.zeros(3, 64, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert tiles == [10] * 10
