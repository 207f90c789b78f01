"""Penalties and biases against their references."""

import torch
from hypothesis import given, settings

from penstock.kernels.sampling.penalties import (
    Penalties,
    add_logit_bias_,
    apply_penalties_,
    apply_penalties_reference,
)
from tests.support.penalized import Penalized, penalized, unpenalized


@settings(max_examples=60, deadline=None)
@given(penalized())
def test_penalties_as_the_reference(case: Penalized) -> None:
    arguments = (case.tokens, case.num_prompt, case.num_tokens, case.penalties)
    expected = apply_penalties_reference(case.logits, *arguments)
    found = case.logits.clone()
    apply_penalties_(found, *arguments)
    torch.testing.assert_close(found, expected)
    same = unpenalized(case)
    assert torch.equal(found[same], case.logits[same])


@settings(max_examples=30, deadline=None)
@given(penalized())
def test_a_row_is_penalised_alike_in_any_company(case: Penalized) -> None:
    crowd = case.logits.clone()
    apply_penalties_(crowd, case.tokens, case.num_prompt, case.num_tokens, case.penalties)
    for row in range(len(crowd)):
        one, most = slice(row, row + 1), int(case.num_tokens[row])
        own = case.penalties
        penalties = Penalties(own.repetition[one], own.presence[one], own.frequency[one])
        alone = case.logits[one].clone()
        said = case.tokens[one, :most]
        apply_penalties_(alone, said, case.num_prompt[one], case.num_tokens[one], penalties)
        assert torch.equal(alone[0], crowd[row])


def test_biases() -> None:
    logits = torch.zeros(3, 4)
    add_logit_bias_(logits, torch.tensor([0, 2]), torch.tensor([3, 1]), torch.tensor([1.5, -2.0]))
    assert logits.nonzero().tolist() == [[0, 3], [2, 1]]
    assert logits.sum() == -0.5
