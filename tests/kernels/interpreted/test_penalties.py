"""The kernels of penalties and biases."""

import pytest
import torch
from hypothesis import given, settings

from penstock.kernels.penalties import Penalties, penalize_, penalize_reference, shift_
from tests.support.penalized import Penalized, penalized, unpenalized


def on(device: torch.device, case: Penalized) -> tuple[torch.Tensor, ...]:
    return tuple(each.to(device) for each in (case.tokens, case.num_prompt, case.num_tokens))


def moved(penalties: Penalties, device: torch.device) -> Penalties:
    return Penalties(
        penalties.repetition.to(device),
        penalties.presence.to(device),
        penalties.frequency.to(device),
    )


@settings(max_examples=12, derandomize=True)
@given(case=penalized())
def test_penalties_as_the_reference(device: torch.device, case: Penalized) -> None:
    arguments = (case.tokens, case.num_prompt, case.num_tokens, case.penalties)
    expected = penalize_reference(case.logits, *arguments)
    found = case.logits.to(device, copy=True)
    tokens, starts, ends = on(device, case)
    penalize_(found, tokens, starts, ends, moved(case.penalties, device))
    torch.testing.assert_close(found.cpu(), expected)
    same = unpenalized(case)
    assert torch.equal(found.cpu()[same], case.logits[same])


def test_a_long_text_of_few_words(device: torch.device) -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, 40), torch.randint(0, 5, (2, 2500))
    starts, ends = torch.tensor([1500, 1]), torch.tensor([2500, 1030])
    penalties = Penalties(
        torch.tensor([1.3, 1]), torch.tensor([0.5, 0]), torch.tensor([0.01, 1e-3])
    )
    expected = penalize_reference(logits, tokens, starts, ends, penalties)
    found = logits.to(device, copy=True)
    penalize_(
        found,
        tokens.to(device),
        starts.to(device),
        ends.to(device),
        moved(penalties, device),
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_biases_and_pairs_that_do_not_exist(device: torch.device) -> None:
    wide = torch.zeros(3, 70, device=device)
    logits = wide[:, :50]
    rows = torch.tensor([0, 2, 1, -1, 3, 1, 1], device=device)
    tokens = torch.tensor([49, 0, 7, 3, 3, 50, -2], device=device)
    values = torch.tensor([1.5, -torch.inf, -2, 9, 9, 9, 9], device=device)
    shift_(logits, rows, tokens, values)
    assert wide.nonzero().tolist() == [[0, 49], [1, 7], [2, 0]]
    assert wide[[0, 1, 2], [49, 7, 0]].tolist() == [1.5, -2, -torch.inf]


def test_what_is_wrong_is_named(device: torch.device) -> None:
    logits, some = (
        torch.zeros(3, 50, device=device),
        torch.zeros(2, dtype=torch.int64, device=device),
    )
    with pytest.raises(ValueError, match="values: float32"):
        shift_(logits, some, some, some)
    with pytest.raises(ValueError, match="logits: float32"):
        shift_(logits.half(), some, some, some.float())
