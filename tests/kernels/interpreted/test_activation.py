"""Compares the Triton kernel of gated activations with a float64 reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.activation.op import (
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_reference,
    silu_and_mul,
    silu_and_mul_reference,
    swiglu_oai,
    swiglu_oai_reference,
)
from tests.support.devices import DTYPES
from tests.support.kernels import close

pytestmark = pytest.mark.interpreted

GATES = [
    (silu_and_mul, silu_and_mul_reference),
    (gelu_tanh_and_mul, gelu_tanh_and_mul_reference),
    (
        lambda x: swiglu_oai(x, 1.702, 7.0),
        lambda x: swiglu_oai_reference(x, 1.702, 7.0),
    ),
]


@pytest.mark.parametrize("gate", range(len(GATES)), ids=["silu", "gelu", "clamped"])
@settings(max_examples=8)
@given(st.integers(0, 9), st.sampled_from([1, 3, 64, 500, 2049]), st.sampled_from(DTYPES))
def test_gates_match_the_reference(gate: int, num_rows: int, dim: int, dtype: torch.dtype) -> None:
    found, expected = GATES[gate]
    gate_up = (torch.randn(num_rows, 2 * dim) * 4).to(dtype)
    wide = expected(gate_up.double())
    close(found(gate_up), wide, 50.0)


# A GPU computes exp(x) as exp2(x * log2(e)) in float32.
# The constant and the product are each rounded by a relative 2**-24.
# The exponent of 2 is therefore wrong by up to |x| * log2(e) * 2**-23.
# This changes exp(x) by a relative |x| * 2**-23.
# Above |x| = 89, exp(x) is 0 or infinite in float32.
# A further 8 ulps cover exp2, the division and the products.
LARGEST_EXPONENT = 89.0


@pytest.mark.parametrize(("found", "expected"), GATES, ids=["silu", "gelu", "clamped"])
def test_large_inputs_and_nan(found: object, expected: object) -> None:
    assert callable(found)
    assert callable(expected)
    edges = torch.tensor([-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, torch.nan])
    gate_up = torch.cartesian_prod(edges, torch.tensor([1.0])).view(1, -1)
    torch.testing.assert_close(
        found(gate_up.clone()).double(),
        expected(gate_up.double()),
        rtol=LARGEST_EXPONENT * 2.0**-23 + 8 * 2.0**-24,
        atol=1e-30,
        equal_nan=True,
    )


def test_strided_rows() -> None:
    wide = torch.randn(6, 96)
    assert torch.equal(silu_and_mul(wide[:, 32:]), silu_and_mul(wide[:, 32:].contiguous()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [1, 200, 2049])
@pytest.mark.parametrize("gate", range(len(GATES)), ids=["silu", "gelu", "clamped"])
def test_row_bits_do_not_depend_on_the_batch(gate: int, dim: int, dtype: torch.dtype) -> None:
    """Some inputs are clamped by the clamped gate, and one row of the batch is NaN."""
    found = GATES[gate][0]
    gate_up = (torch.randn(9, 2 * dim) * 9).to(dtype)
    gate_up[2] = torch.nan
    batched = found(gate_up)
    for row in (0, 5, 8):
        assert torch.equal(found(gate_up[row : row + 1])[0], batched[row])
    assert torch.equal(found(gate_up[4:8]), batched[4:8])


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(
        ValueError, match="gate_up has 7 columns: expected an even number, at least 2"
    ):
        silu_and_mul(torch.randn(3, 7))
    with pytest.raises(ValueError, match=r"gate_up has shape \[8\]: expected \[T, 2 I\]"):
        gelu_tanh_and_mul(torch.randn(8))
