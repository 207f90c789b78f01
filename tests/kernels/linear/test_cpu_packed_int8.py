"""INT8 linears on AMX, VNNI and AVX2: exact sums for any shape, and batch-invariant."""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.cpu_common.cpu_features import has_amx
from penstock.kernels.linear import cpu_packed_int8 as levels
from penstock.kernels.linear.cpu_packed_int8 import (
    PackedLinearInt8,
    has_int8_loops,
    pack_int8_tiles,
    supports_int8_tiles,
)
from penstock.kernels.linear.op import int8_linear_reference, pack_int8
from penstock.kernels.linear.quantize_rows import ZERO_POINT, quantize_per_token
from tests.support.threads import threads

pytestmark = pytest.mark.skipif(not has_int8_loops(), reason="needs AVX2 or VNNI")

# These numbers repeat constants of `linear/cpu_int8_amx`, which can be imported only with numba.
TILE_K, BLOCK_COLUMNS, BLOCK_ROWS = 64, 64, 32
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 200)


@pytest.fixture(params=["AMX", "SIMD"], autouse=True, scope="module")
def loops(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Use the AMX loops, or those for VNNI and AVX2, even if the CPU supports both."""
    if request.param == "AMX" and not has_amx():
        pytest.skip("needs AMX")
    levels._kernels()  # configures numba, which must happen before the import
    from penstock.kernels.linear import cpu_int8_amx, cpu_int8_simd

    chosen: ModuleType = cpu_int8_amx if request.param == "AMX" else cpu_int8_simd
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "_kernels", lambda: chosen)
        yield chosen


def test_constants_match_the_loops() -> None:
    from penstock.kernels.cpu_common import int8_dot
    from penstock.kernels.linear import cpu_int8_amx

    loops: Any = cpu_int8_amx
    assert (int8_dot.TILE_K, 16 * int8_dot.TILES_ACROSS) == (TILE_K, BLOCK_COLUMNS)
    assert (loops.TILE_K, loops.BLOCK_COLUMNS, loops.BLOCK_ROWS) == (
        TILE_K,
        BLOCK_COLUMNS,
        BLOCK_ROWS,
    )


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the reference for `x` as `quantize_per_token` rounds it: ties may go up or down."""
    rows, factors = quantize_per_token(x)
    y = int8_linear_reference(127 * torch.eye(weight.shape[1]), weight, None, 127)
    y = (rows.double() - ZERO_POINT) @ y * (factors.double() / 127)
    return (y if bias is None else y + bias.double()).float()


@pytest.mark.parametrize("num_inputs", [TILE_K, 2 * TILE_K, 13 * TILE_K])
@pytest.mark.parametrize(
    "num_outputs", [1, 31, BLOCK_COLUMNS - 1, BLOCK_COLUMNS, BLOCK_COLUMNS + 1, 5 * BLOCK_COLUMNS]
)
def test_matches_the_reference_for_any_shape(num_inputs: int, num_outputs: int) -> None:
    weight, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
    for added in (None, bias):
        product = pack_int8(weight, added)
        assert isinstance(product, PackedLinearInt8)
        for rows in ROWS:
            x = torch.randn(rows, num_inputs) * torch.rand(rows, 1) * 9
            found = product(x)
            assert found.shape == (rows, num_outputs)
            assert found.is_contiguous()
            torch.testing.assert_close(found, exact(x, weight, added), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", range(1, 8))
def test_the_largest_sums_are_exact(rows: int) -> None:
    """Inputs are +-127 (as unsigned numbers with zero point 128: 255 or 1)."""
    num_inputs = 200 * TILE_K
    codes = torch.tensor([127, -127, -128], dtype=torch.int8)
    product = pack_int8_tiles(codes[:, None].repeat(1, num_inputs), torch.ones(3), None)
    x = torch.full((rows, num_inputs), 127.0)
    expected = (codes.float() * 127 * num_inputs).repeat(rows, 1)
    assert torch.equal(product(x), expected)
    assert torch.equal(product(-x), -expected)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(1, 200), st.integers(1, 90), st.integers(1, 4), st.data())
def test_row_bits_do_not_depend_on_rows_or_threads(
    steps: int, num_outputs: int, rows: int, count: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(num_outputs, steps * TILE_K, generator=generator)
    x = torch.randn(rows, steps * TILE_K, generator=generator)
    whole = pack_int8(weight, None)(x)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    with threads(count), pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "MIN_PARALLEL_MACS", 0)
        assert torch.equal(pack_int8(weight, None)(x[first:last]), whole[first:last])


def test_rows_with_nan_or_inf_are_not_finite_and_do_not_affect_others() -> None:
    product = pack_int8(torch.randn(70, TILE_K), None)
    x = torch.randn(20, TILE_K)
    before = product(x)
    x[3, 5], x[17, 0] = torch.nan, torch.inf
    found = product(x)
    broken = [3, 17]
    assert not found[broken].isfinite().any()
    rest = [row for row in range(20) if row not in broken]
    assert torch.equal(found[rest], before[rest])


def test_invalid_inputs_are_refused() -> None:
    product = pack_int8(torch.randn(70, TILE_K), None)
    for x in (torch.randn(2, TILE_K + 1), torch.randn(TILE_K), torch.randn(2, TILE_K).double()):
        with pytest.raises(ValueError, match=r"x has shape .*: expected \[T, 64\] float32"):
            product(x)
    assert not supports_int8_tiles(torch.randn(70, TILE_K + 8))
