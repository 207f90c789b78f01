"""INT8 linears on AMX, VNNI and AVX2: exact sums for any shape, and batch-invariant."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.activation.op import gelu_tanh_and_mul, silu_and_mul
from penstock.kernels.cpu_common.cpu_features import has_amx
from penstock.kernels.linear import cpu_packed_int8 as levels
from penstock.kernels.linear.cpu_packed_int8 import (
    PackedLinearInt8,
    has_int8_loops,
    pack_int8_tiles,
    supports_int8_tiles,
)
from penstock.kernels.linear.gate_kinds import NO_GATE, SILU, TANH_GELU
from penstock.kernels.linear.op import int8_linear_reference, pack_int8, pack_int8_matrix
from penstock.kernels.linear.quantize_rows import ZERO_POINT, quantize_per_token
from penstock.kernels.linear.quantize_weights import quantize_weight
from tests.support.threads import threads

pytestmark = pytest.mark.skipif(not has_int8_loops(), reason="needs AVX2 or VNNI")

# These numbers repeat constants of `linear/cpu_int8_amx`, which can be imported only with numba.
TILE_K, BLOCK_COLUMNS, BLOCK_ROWS = 64, 64, 32
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 200, 257)


@pytest.fixture(params=["AMX", "SIMD"], autouse=True, scope="module")
def loops(request: pytest.FixtureRequest) -> Iterator[levels._Kernels]:
    """Use the AMX loops, or those for VNNI and AVX2, even if the CPU supports both."""
    if request.param == "AMX" and not has_amx():
        pytest.skip("needs AMX")
    levels._kernels()  # configures numba, which must happen before the import
    from penstock.kernels.linear import cpu_int8_amx, cpu_int8_amx_rows, cpu_int8_simd

    chosen = levels._Kernels(cpu_int8_simd, None)
    if request.param == "AMX":
        chosen = levels._Kernels(cpu_int8_amx, cpu_int8_amx_rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(levels, "_kernels", lambda: chosen)
        yield chosen


def test_constants_match_the_loops() -> None:
    from penstock.kernels.cpu_common import int8_dot
    from penstock.kernels.linear import cpu_int8_amx

    loops: Any = cpu_int8_amx
    assert 16 * int8_dot.BLOCK_STRIPS == BLOCK_COLUMNS
    constants = (TILE_K, BLOCK_COLUMNS, BLOCK_ROWS)
    assert constants == (loops.TILE_K, loops.BLOCK_COLUMNS, loops.BLOCK_ROWS)
    assert constants == (levels._TILE_K, levels._BLOCK_COLUMNS, levels._BLOCK_ROWS)


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
        patch.setattr(levels, "_ROWS_PER_THREAD", data.draw(st.sampled_from([1, 1000])))
        assert torch.equal(pack_int8(weight, None)(x[first:last]), whole[first:last])


@pytest.mark.parametrize("divides_rows", [False, True])
def test_rows_with_nan_or_inf_are_not_finite_and_do_not_affect_others(
    divides_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(levels, "_ROWS_PER_THREAD", 1 if divides_rows else 1000)
    product = pack_int8(torch.randn(70, TILE_K), None)
    x = torch.randn(20, TILE_K)
    before = product(x)
    x[3, 5], x[17, 0] = torch.nan, torch.inf
    found = product(x)
    broken = [3, 17]
    assert not found[broken].isfinite().any()
    rest = [row for row in range(20) if row not in broken]
    assert torch.equal(found[rest], before[rest])


@pytest.mark.parametrize(
    ("gate", "activation"), [(SILU, silu_and_mul), (TANH_GELU, gelu_tanh_and_mul)]
)
@pytest.mark.parametrize("limit", [0.0, 3.0])
def test_gated_equals_a_separate_activation(
    gate: int, activation: Callable[[torch.Tensor], torch.Tensor], limit: float, loops: Any
) -> None:
    weight, bias = torch.randn(256, 3 * TILE_K), torch.randn(256)
    product = pack_int8_matrix(quantize_weight(weight, "int8"), bias, limit)
    assert isinstance(product, PackedLinearInt8)
    with threads(2):
        assert not product.fuses_gate(255)
        assert product.fuses_gate(256) == (loops.rows is not None)
        assert not pack_int8_rows(96).fuses_gate(1000)
        for rows in (256, 271, 300, 513) if loops.rows else ():
            x = torch.randn(rows, 3 * TILE_K) * torch.rand(rows, 1) * 9
            found = product.gated(x, gate)
            assert torch.equal(found, activation(product(x)))
            one_by_one = torch.cat([product(row) for row in torch.split(x, 1)])
            assert torch.equal(found, activation(one_by_one))


def pack_int8_rows(num_outputs: int) -> PackedLinearInt8:
    """Return a layer with random weights."""
    product = pack_int8(torch.randn(num_outputs, TILE_K), None)
    assert isinstance(product, PackedLinearInt8)
    return product


def test_invalid_inputs_are_refused() -> None:
    product = pack_int8_rows(70)
    for x in (torch.randn(2, TILE_K + 1), torch.randn(TILE_K), torch.randn(2, TILE_K).double()):
        with pytest.raises(ValueError, match=r"x has shape .*: expected \[T, 64\] float32"):
            product(x)
        with pytest.raises(ValueError, match=r"x has shape .*: expected \[T, 64\] float32"):
            product.gated(x, SILU)
    for num_rows, num_outputs, gate in ((1, 128, SILU), (1000, 70, SILU), (1000, 128, NO_GATE)):
        with pytest.raises(ValueError, match="does not support gate"):
            pack_int8_rows(num_outputs).gated(torch.randn(num_rows, TILE_K), gate)
    assert not supports_int8_tiles(torch.randn(70, TILE_K + 8))
