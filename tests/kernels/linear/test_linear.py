"""Compares packed linears with their references."""

import pytest
import torch
from torch.nn import functional

from penstock.kernels.linear import op as products
from penstock.kernels.linear.op import (
    FBGEMM_QMAX,
    OneDnnLinear,
    PaddedLinear,
    activation_qmax,
    batch_invariant_unsupported_reason,
    int8_linear_reference,
    int8_unsupported_reason,
    pack_batch_invariant,
    pack_int8,
    pack_int8_codes,
    pack_onednn,
)
from tests.support.threads import threads

ROWS = (1, 2, 7, 64)
BIASES = (None, torch.randn(19))
needs_int8 = pytest.mark.skipif(
    bool(int8_unsupported_reason(torch.device("cpu"), torch.float32)),
    reason="needs INT8 linears on this CPU",
)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("rows", ROWS)
def test_onednn(rows: int, bias: torch.Tensor | None) -> None:
    x, weight = torch.randn(rows, 45), torch.randn(19, 45)
    found = pack_onednn(weight, bias)(x)
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_panels", [True, False])
@pytest.mark.parametrize("shape", [(1, 45), (19, 45), (7, 1), (130, 2050), (600, 768)])
def test_batch_invariant_row_bits_do_not_depend_on_batch_or_threads(
    shape: tuple[int, int], in_panels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "supports_packed_f32", lambda weight: in_panels)
    torch.manual_seed(0)
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(131, shape[1])
    product = pack_batch_invariant(weight.T.contiguous().T, bias)
    whole = product(x)
    torch.testing.assert_close(whole, functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)
    for count in (1, 2, 3):
        with threads(count):
            for first, rows in ((0, 131), (3, 1), (5, 2), (9, 33), (2, 128), (60, 7)):
                assert torch.equal(product(x[first : first + rows]), whole[first : first + rows])


def batch_dependent(product: OneDnnLinear, x: torch.Tensor) -> torch.Tensor:
    """A fake oneDNN linear whose rounding depends on the number of rows."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
        x, product.blocked, product.bias, "none", [], ""
    )
    return y * (1 + 2**-22 * (len(x) % 5))


def test_rows_are_padded_if_the_library_is_not_batch_invariant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, bias, x = torch.randn(9, 33), torch.randn(9), torch.randn(50, 33)
    monkeypatch.setattr(products, "supports_packed_f32", lambda weight: False)
    monkeypatch.setattr(products, "_fixed_by_itself", {})
    monkeypatch.setattr(OneDnnLinear, "__call__", batch_dependent)
    product = pack_batch_invariant(weight, bias)
    assert isinstance(product, PaddedLinear)
    whole = product(x)
    torch.testing.assert_close(whole, functional.linear(x, weight, bias), rtol=1e-5, atol=1e-5)
    for first, rows in ((0, 50), (3, 1), (5, 16), (9, 33)):
        assert torch.equal(product(x[first : first + rows]), whole[first : first + rows])


def test_batch_invariant_unsupported_reasons() -> None:
    assert batch_invariant_unsupported_reason(torch.device("cpu"), torch.float32) == ""
    assert "float16" in batch_invariant_unsupported_reason(torch.device("cpu"), torch.float16)
    assert batch_invariant_unsupported_reason(torch.device("cuda"), torch.bfloat16) == ""
    assert "float64" in batch_invariant_unsupported_reason(torch.device("cuda"), torch.float64)
    assert "mps" in batch_invariant_unsupported_reason(torch.device("mps"), torch.float32)


@needs_int8
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("rows", ROWS)
def test_int8(rows: int, bias: torch.Tensor | None) -> None:
    # Inputs differ from whole codes by at most 0.4, so float32 and float64 round to the same codes.
    weight = torch.randn(19, 45)
    most = activation_qmax(weight)
    codes = torch.randint(1 - most, most, (rows, 45)).float()
    codes[:, 0] = most  # the largest code sets the scale of each row to 0.07
    x = (codes + torch.rand(rows, 45).sub(0.5).mul(0.8)).clamp(-most, most) * 0.07
    x[:, 0] = most * 0.07
    found = pack_int8(weight, bias)(x)
    exact = int8_linear_reference(x, weight, bias, most)
    torch.testing.assert_close(found, exact.float(), rtol=1e-5, atol=1e-4)
    plain = functional.linear(x, weight, bias)
    assert (found - plain).norm() < 0.03 * plain.norm()


@pytest.mark.parametrize("library", ["oneDNN", "FBGEMM"])
@needs_int8
def test_libraries_use_static_scales_of_activations(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inputs are multiples of the scale, far from ties; some are clipped."""
    if library == "FBGEMM":
        monkeypatch.setattr(products, "_has_vnni", lambda: False)
    elif not products._has_vnni():
        pytest.skip("needs VNNI")
    steps, scale = (127 if library == "oneDNN" else FBGEMM_QMAX), 0.25
    codes = torch.randint(-steps, steps + 1, (5, 100))
    x = scale * (codes + 0.5 * torch.rand(5, 100) - 0.25)
    x[1, :9], codes[1, :9] = 1000.0, steps
    x[3, 4] = torch.nan
    weight, scales = torch.randint(-127, 128, (19, 100), dtype=torch.int8), torch.rand(19)
    found = pack_int8_codes(weight, scales, None, scale * steps)(x)
    expected = (codes.double() @ weight.double().T * scales * scale).float()
    assert found[3].isnan().all()
    torch.testing.assert_close(found[[0, 1, 2, 4]], expected[[0, 1, 2, 4]], rtol=1e-5, atol=1e-4)


@needs_int8
def test_int8_at_its_largest_does_not_saturate() -> None:
    weight = torch.ones(16, 512)
    for sign in (1.0, -1.0):
        found = pack_int8(weight, None)(torch.full((2, 512), sign))
        torch.testing.assert_close(found, torch.full((2, 16), 512 * sign))


@needs_int8
def test_int8_row_bits_do_not_depend_on_the_batch() -> None:
    x = torch.randn(33, 96) * torch.logspace(-3, 3, 33)[:, None]
    product = pack_int8(torch.randn(40, 96), None)
    whole = product(x)
    for row in range(33):
        assert torch.equal(product(x[row : row + 1])[0], whole[row])


@needs_int8
def test_an_int8_row_with_nan_stays_nan_and_does_not_affect_others() -> None:
    x = torch.randn(4, 32)
    x[1, 5], x[2] = torch.nan, 0
    found = pack_int8(torch.randn(8, 32), None)(x)
    assert found[1].isnan().all()
    assert torch.equal(found[2], torch.zeros(8))
    assert found[[0, 3]].isfinite().all()


def test_int8_unsupported_reasons() -> None:
    assert "float32" in int8_unsupported_reason(torch.device("cpu"), torch.bfloat16)
    assert "cuda" in int8_unsupported_reason(torch.device("cuda"), torch.float32)
