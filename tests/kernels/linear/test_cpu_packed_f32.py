"""float32 linears with panel-packed weights: correct for any shape, and batch-invariant."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.linear import cpu_packed_f32 as panels
from penstock.kernels.linear.cpu_packed_f32 import (
    pack_f32,
    packed_f32_reference,
    supports_packed_f32,
)
from penstock.kernels.linear.panels import PANEL as COLUMNS
from tests.support.threads import threads

# Constants of `linear/cpu_f32_simd`, which needs numba. A panel has 24 or 48 columns.
# A tile has 4 or 8 rows.
BLOCK_K, TILE_ROWS, PANEL = 192, 8, 48
EDGES = (1, 2, 23, 24, 25, PANEL - 1, PANEL, PANEL + 1, 3 * PANEL, 9 * PANEL + 1)
ROWS = (
    0,
    1,
    2,
    3,
    4,
    5,
    TILE_ROWS - 1,
    TILE_ROWS,
    TILE_ROWS + 1,
    15,
    16,
    17,
    32,
    33,
    64,
    65,
    90,
    300,
)


@pytest.fixture(params=["vectors", "amx"], autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force all linears of a test to use vectors, or AMX."""
    uses_amx = request.param == "amx"
    if uses_amx and not panels.has_amx():
        pytest.skip("needs AMX")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(panels, "has_amx", lambda: uses_amx)
        patch.setattr(panels, "MIN_AMX_ROWS", 0)
        yield request.param


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return packed_f32_reference(x, weight, bias).float()


def test_constants_match_the_loops() -> None:
    from penstock.kernels.linear import cpu_f32_simd as loops

    assert loops.BLOCK_K == BLOCK_K
    assert (loops.TILE_ROWS, COLUMNS) in ((TILE_ROWS, PANEL), (TILE_ROWS // 2, PANEL // 2))


@pytest.mark.parametrize("num_inputs", [1, BLOCK_K - 1, BLOCK_K, BLOCK_K + 1, 2 * BLOCK_K + 7])
@pytest.mark.parametrize("num_outputs", EDGES)
def test_matches_the_reference_for_any_shape(num_inputs: int, num_outputs: int) -> None:
    weight, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
    for added in (None, bias):
        product = pack_f32(weight, added)
        for rows in ROWS:
            x = torch.randn(rows, num_inputs)
            found = product(x)
            assert found.shape == (rows, num_outputs)
            assert found.is_contiguous()
            torch.testing.assert_close(found, exact(x, weight, added), rtol=1e-5, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 2 * BLOCK_K + 9),
    st.integers(1, 3 * PANEL),
    st.integers(1, 200),
    st.integers(1, 4),
    st.data(),
)
def test_row_bits_do_not_depend_on_rows_columns_or_threads(
    num_inputs: int, num_outputs: int, rows: int, count: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    x = torch.randn(rows, num_inputs, generator=generator)
    product = pack_f32(weight, None)
    whole = product(x)
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    with threads(count), pytest.MonkeyPatch.context() as patch:
        patch.setattr(panels, "MIN_PARALLEL_MACS", 0)
        assert torch.equal(product(x[first:last]), whole[first:last])
        columns = data.draw(st.integers(1, num_outputs))
        assert torch.equal(pack_f32(weight[:columns], None)(x), whole[:, :columns])


def test_threads_do_not_change_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "MIN_PARALLEL_MACS", 0)
    weight, x = torch.randn(2 * PANEL + 5, 40), torch.randn(1030, 40)
    product = pack_f32(weight, None)
    with threads(1):
        single = product(x)
    torch.testing.assert_close(single, exact(x, weight, None), rtol=1e-5, atol=1e-4)
    for count in (2, 3, 5):
        with threads(count):
            assert torch.equal(product(x), single)


def test_rows_with_nan_or_inf_do_not_affect_other_rows() -> None:
    weight, x = torch.randn(PANEL + 3, 30), torch.randn(11, 30)
    product = pack_f32(weight, None)
    before = product(x)
    x[4, 7], x[9, 0] = torch.nan, torch.inf
    after = product(x)
    assert after[4].isnan().all()
    assert not after[9].isfinite().any()
    kept = [row for row in range(11) if row not in (4, 9)]
    assert torch.equal(after[kept], before[kept])


def test_inputs_of_all_magnitudes_keep_float32_precision(isa: str) -> None:
    """The error of a result is below 2^-22 times the sum of the absolute values of its terms."""
    generator = torch.Generator().manual_seed(1)
    scales = torch.logspace(-30, 30, 200, base=2.0)[None]
    weight = torch.randn(64, 200, generator=generator) / scales
    x = torch.randn(70, 200, generator=generator) * scales
    exactly = x.double() @ weight.double().T
    sizes = x.double().abs() @ weight.double().abs().T
    found = pack_f32(weight, None)(x).double()
    assert ((found - exactly).abs() / sizes).max() < 2**-22


def test_strided_weights_and_rows() -> None:
    weight, x = torch.randn(30, 2 * PANEL).T, torch.randn(9, 60)[:, ::2]
    found = pack_f32(weight, None)(x)
    torch.testing.assert_close(found, exact(x, weight, None), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    "x", [torch.randn(3, 7), torch.randn(8), torch.randn(3, 8).double(), torch.randn(2, 3, 8)]
)
def test_invalid_inputs_are_refused(x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"x has shape .*: expected \[T, 8\] float32"):
        pack_f32(torch.randn(5, 8), None)(x)


def test_few_rows_use_vectors_and_more_use_amx(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if isa == "vectors":
        return
    calls: list[str] = []

    def recording(name: str, loops: Any) -> Callable[[], Any]:
        def record() -> Any:
            calls.append(name)
            return loops

        return record

    monkeypatch.setattr(panels, "MIN_AMX_ROWS", 12)
    monkeypatch.setattr(panels, "_simd_kernels", recording("vectors", panels._simd_kernels()))
    monkeypatch.setattr(panels, "_amx_kernels", recording("tiles", panels._amx_kernels()))
    weight = torch.randn(64, 32)
    default, invariant = pack_f32(weight, None), pack_f32(weight, None, batch_invariant=True)
    calls.clear()
    for rows in (1, 11, 12):
        default(torch.randn(rows, 32))
        invariant(torch.randn(rows, 32))
    assert calls == ["vectors", "tiles", "vectors", "tiles", "tiles", "tiles"]


def test_supported_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(panels, "has_avx2", lambda: True)
    assert supports_packed_f32(torch.randn(5, 8))
    assert not supports_packed_f32(torch.randn(5, 8).bfloat16())
    assert not supports_packed_f32(torch.empty(5, 8, device="meta"))
    assert not supports_packed_f32(torch.empty(0, 8))
    monkeypatch.setattr(panels, "has_avx2", lambda: False)
    assert not supports_packed_f32(torch.randn(5, 8))
