"""Compares the Triton kernel of rotary embeddings with a float64 reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.rope.op import rotary_table, rotate_, rotate_reference
from tests.support.devices import DTYPES
from tests.support.kernels import close

pytestmark = pytest.mark.interpreted


@settings(max_examples=16)
@given(
    st.integers(0, 40),
    st.sampled_from([1, 3, 8]),
    st.sampled_from([2, 6, 64, 80]),
    st.booleans(),
    st.sampled_from(DTYPES),
)
def test_views_are_rotated_in_place(
    num_tokens: int, num_heads: int, dim: int, interleaved: bool, dtype: torch.dtype
) -> None:
    frequencies = torch.rand(dim // 2)
    table = rotary_table(frequencies, 300, torch.float32, interleaved=interleaved)
    positions = torch.randint(0, 300, (num_tokens,))
    fused = torch.randn(num_tokens, num_heads + 2, dim + 10).to(dtype)
    expected = fused.clone()
    rotated = expected[:, 1:-1, 10:]
    rotated.copy_(rotate_reference(rotated.double(), positions, frequencies, interleaved))
    rotate_(fused[:, 1:-1, 10:], table[positions], interleaved)
    # The angles are at most 300. In float32, such an angle has an error of up to 300 x 2^-24.
    close(fused, expected, 300.0 if dtype == torch.float32 else 1.0)


def test_the_table_may_have_the_dtype_of_x() -> None:
    x = torch.randn(3, 2, 16).half()
    table = rotary_table(torch.rand(8), 3, torch.float16)
    expected = x.double()
    rotate_(x, table)
    low, high = expected.chunk(2, -1)
    cos, sin = table[:, :1].double(), table[:, 1:].double()
    close(x, expected * cos + torch.cat((high, low), -1) * sin)


@pytest.mark.parametrize("interleaved", [False, True])
def test_bits_of_a_token_do_not_depend_on_the_batch(interleaved: bool) -> None:
    x, table = torch.randn(70, 3, 24), rotary_table(torch.rand(12), 70, torch.float32)
    batched = x.clone()
    rotate_(batched, table, interleaved)
    for row in (0, 33, 69):
        single = x[row : row + 1].clone()
        rotate_(single, table[row : row + 1], interleaved)
        assert torch.equal(single[0], batched[row])


def test_invalid_arguments_are_refused() -> None:
    x, table = torch.randn(3, 2, 16), rotary_table(torch.rand(8), 3, torch.float32)
    with pytest.raises(ValueError, match=r"cos_sin has shape \[2, 2, 16\]: expected \[3, 2, R\]"):
        rotate_(x, table[:2])
    with pytest.raises(
        ValueError, match="cos_sin has 16 features: expected an even number from 2 to 12"
    ):
        rotate_(x[:, :, :12], table)
    with pytest.raises(ValueError, match="cos_sin has 12 features: expected 16"):
        rotate_(x, table[:, :, :12].contiguous())
    with pytest.raises(ValueError, match="x has shape"):
        rotate_(x[0], table)
