"""The Triton kernel of token masks."""

import torch
from hypothesis import given, settings

from penstock.kernels.sampling.token_mask import apply_token_mask_, apply_token_mask_reference
from tests.support.token_masks import MaskCase, mask_cases


@settings(max_examples=25, derandomize=True)
@given(case=mask_cases())
def test_masked_logits_are_those_of_the_reference(device: torch.device, case: MaskCase) -> None:
    expected = apply_token_mask_reference(case.logits, case.rows, case.words)
    found = case.logits.to(device, copy=True)
    if len(case.rows):
        apply_token_mask_(found, case.rows.to(device), case.words.to(device))
    assert torch.equal(found.cpu().view(torch.int32), expected.view(torch.int32))


def test_rows_outside_the_logits_are_ignored(device: torch.device) -> None:
    logits = torch.zeros(2, 40, device=device)
    words = torch.zeros(2, 2, dtype=torch.int32, device=device)
    apply_token_mask_(logits, torch.tensor([-1, 2], device=device), words)
    assert not logits.any()
