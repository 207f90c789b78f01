"""Compares penalties and logit biases on a CPU with their references."""

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
def test_penalties_match_the_reference(case: Penalized) -> None:
    arguments = (case.tokens, case.num_prompt, case.num_tokens, case.penalties)
    expected = apply_penalties_reference(case.logits, *arguments)
    found = case.logits.clone()
    apply_penalties_(found, *arguments)
    torch.testing.assert_close(found, expected)
    same = unpenalized(case)
    assert torch.equal(found[same], case.logits[same])


@settings(max_examples=30, deadline=None)
@given(penalized())
def test_penalties_of_a_row_do_not_depend_on_the_batch(case: Penalized) -> None:
    batched = case.logits.clone()
    apply_penalties_(batched, case.tokens, case.num_prompt, case.num_tokens, case.penalties)
    for row in range(len(batched)):
        one, length = slice(row, row + 1), int(case.num_tokens[row])
        own = case.penalties
        penalties = Penalties(own.repetition[one], own.presence[one], own.frequency[one])
        single = case.logits[one].clone()
        tokens = case.tokens[one, :length]
        apply_penalties_(single, tokens, case.num_prompt[one], case.num_tokens[one], penalties)
        assert torch.equal(single[0], batched[row])


def test_logit_bias() -> None:
    logits = torch.zeros(3, 4)
    add_logit_bias_(logits, torch.tensor([0, 2]), torch.tensor([3, 1]), torch.tensor([1.5, -2.0]))
    assert logits.nonzero().tolist() == [[0, 3], [2, 1]]
    assert logits.sum() == -0.5
