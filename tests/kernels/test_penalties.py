"""Penalties and biases against their references."""

import torch
from hypothesis import given, settings

from penstock.kernels.penalties import penalize_, penalize_reference, shift_
from tests.support.penalized import Penalized, penalized, unpenalized


@settings(max_examples=60, deadline=None)
@given(penalized())
def test_penalties_as_the_reference(case: Penalized) -> None:
    arguments = (case.tokens, case.num_prompt, case.num_tokens, case.penalties)
    expected = penalize_reference(case.logits, *arguments)
    found = case.logits.clone()
    penalize_(found, *arguments)
    torch.testing.assert_close(found, expected)
    same = unpenalized(case)
    assert torch.equal(found[same], case.logits[same])


def test_biases() -> None:
    logits = torch.zeros(3, 4)
    shift_(logits, torch.tensor([0, 2]), torch.tensor([3, 1]), torch.tensor([1.5, -2.0]))
    assert logits.nonzero().tolist() == [[0, 3], [2, 1]]
    assert logits.sum() == -0.5
