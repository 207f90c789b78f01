"""Token masks on a CPU: the compiled loop gives the reference's logits bitwise."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels.sampling.token_mask import (
    apply_host_masks_,
    apply_token_mask_,
    apply_token_mask_reference,
)
from tests.support.token_masks import MaskCase, mask_cases


@given(case=mask_cases())
def test_masked_logits_are_those_of_the_reference(case: MaskCase) -> None:
    expected = apply_token_mask_reference(case.logits, case.rows, case.words)
    found = case.logits.clone()
    apply_token_mask_(found, case.rows, case.words)
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


@pytest.mark.parametrize("padding", [0, 3])
@given(case=mask_cases())
def test_masks_in_arrays_give_the_logits_of_the_reference(padding: int, case: MaskCase) -> None:
    expected = apply_token_mask_reference(case.logits, case.rows, case.words)
    # Padding makes the rows non-contiguous.
    found = torch.nn.functional.pad(case.logits, (0, padding))[:, : case.logits.shape[1]]
    apply_host_masks_(found, case.rows.numpy(), case.words.numpy())
    assert torch.equal(found.contiguous().view(torch.int32), expected.view(torch.int32))


def test_masks_in_arrays_of_another_size_or_type_are_refused() -> None:
    logits, rows = torch.zeros(1, 40), np.zeros(1, np.int64)
    for words in (np.zeros((1, 1), np.int32), np.zeros((2, 2), np.int32)):
        with pytest.raises(ValueError, match=r"words has .*: expected 1 masks of at least 40 bits"):
            apply_host_masks_(logits, rows, words)
    with pytest.raises(TypeError):
        apply_host_masks_(logits.double(), rows, np.zeros((1, 2), np.int32))


def test_exactly_the_tokens_with_a_clear_bit_are_excluded() -> None:
    logits = torch.arange(80, dtype=torch.float32).reshape(2, 40)
    words = torch.tensor([[0b101, 1 << 3]], dtype=torch.int32)
    apply_token_mask_(logits, torch.tensor([1]), words)
    assert torch.equal(logits[0], torch.arange(40.0))
    assert logits[1].isfinite().nonzero()[:, 0].tolist() == [0, 2, 35]


def test_mask_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="`words` has 32 bits per mask: expected at least 40"):
        apply_token_mask_(
            torch.zeros(1, 40), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32)
        )


@pytest.mark.parametrize("padding", [0, 3])
@given(case=mask_cases(), data=st.data())
def test_rows_with_nan_or_inf_before_the_masks_are_reported(
    padding: int, case: MaskCase, data: st.DataObject
) -> None:
    logits = case.logits.clone()
    places = st.tuples(
        st.integers(0, logits.shape[0] - 1),
        st.integers(0, logits.shape[1] - 1),
        st.sampled_from([torch.nan, -torch.nan, torch.inf, -torch.inf, 3.4e38, -3.4e38, 1e-45]),
    )
    for row, token, value in data.draw(st.lists(places, max_size=3)):
        logits[row, token] = value
    expected = logits.isfinite().all(-1).numpy()
    logits = torch.nn.functional.pad(logits, (0, padding))[:, : logits.shape[1]]
    finite = apply_host_masks_(logits, case.rows.numpy(), case.words.numpy())
    assert np.array_equal(finite, expected)
