"""The Triton kernels of penalties and logit biases."""

import pytest
import torch
from hypothesis import given, settings

from penstock.kernels.sampling.penalties import (
    Penalties,
    add_logit_bias_,
    apply_penalties_,
    apply_penalties_reference,
)
from tests.support.penalized import Penalized, penalized, unpenalized


def history_on(device: torch.device, case: Penalized) -> tuple[torch.Tensor, ...]:
    return tuple(each.to(device) for each in (case.tokens, case.num_prompt, case.num_tokens))


def penalties_on(penalties: Penalties, device: torch.device) -> Penalties:
    return Penalties(
        penalties.repetition.to(device),
        penalties.presence.to(device),
        penalties.frequency.to(device),
    )


@settings(max_examples=12, derandomize=True)
@given(case=penalized())
def test_penalties_match_the_reference(device: torch.device, case: Penalized) -> None:
    arguments = (case.tokens, case.num_prompt, case.num_tokens, case.penalties)
    expected = apply_penalties_reference(case.logits, *arguments)
    found = case.logits.to(device, copy=True)
    tokens, starts, ends = history_on(device, case)
    apply_penalties_(found, tokens, starts, ends, penalties_on(case.penalties, device))
    torch.testing.assert_close(found.cpu(), expected)
    same = unpenalized(case)
    assert torch.equal(found.cpu()[same], case.logits[same])


def test_long_history_with_many_repetitions(device: torch.device) -> None:
    torch.manual_seed(0)
    logits, tokens = torch.randn(2, 40), torch.randint(0, 5, (2, 2500))
    starts, ends = torch.tensor([1500, 1]), torch.tensor([2500, 1030])
    penalties = Penalties(
        torch.tensor([1.3, 1]), torch.tensor([0.5, 0]), torch.tensor([0.01, 1e-3])
    )
    expected = apply_penalties_reference(logits, tokens, starts, ends, penalties)
    found = logits.to(device, copy=True)
    apply_penalties_(
        found,
        tokens.to(device),
        starts.to(device),
        ends.to(device),
        penalties_on(penalties, device),
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_penalties_of_a_row_do_not_depend_on_the_batch(device: torch.device) -> None:
    """Results are bitwise equal. Histories span several programs; one row of the batch is NaN."""
    torch.manual_seed(1)
    logits, tokens = torch.randn(5, 300) * 7, torch.randint(0, 300, (5, 2300))
    logits[1] = torch.nan
    starts, ends = torch.tensor([1, 9, 1500, 40, 2300]), torch.tensor([1, 700, 2300, 1100, 2300])
    penalties = Penalties(
        torch.tensor([1.3, 1.1, 0.7, 1, 1.9]),
        torch.tensor([0.5, 0.1, 0, -0.3, 0.7]),
        torch.tensor([0.01, 1, 0.3, 1e-3, -0.2]),
    )
    names = ("repetition", "presence", "frequency")

    def penalised(rows: list[int], length: int) -> torch.Tensor:
        found = logits[rows].to(device, copy=True)
        history, first, last = (
            each[rows].to(device) for each in (tokens[:, :length], starts, ends)
        )
        own = Penalties(*(getattr(penalties, name)[rows].to(device) for name in names))
        apply_penalties_(found, history, first, last, own)
        return found

    batched = penalised([0, 1, 2, 3, 4], 2300)
    for row in (0, 2, 3, 4):
        assert torch.equal(penalised([row], int(ends[row]))[0], batched[row])
    assert torch.equal(penalised([3, 0], 1200), batched[[3, 0]])


def test_logit_bias_of_a_row_does_not_depend_on_the_batch(device: torch.device) -> None:
    torch.manual_seed(2)
    logits = (torch.randn(4, 3000) * 7).to(device)
    rows = torch.arange(4, device=device).repeat_interleave(700)
    tokens = torch.cat([torch.randperm(3000)[:700] for _ in range(4)]).to(device)
    values = torch.randn(2800).where(torch.rand(2800) < 0.9, -torch.inf).to(device)
    batched = logits.clone()
    add_logit_bias_(batched, rows, tokens, values)
    assert (batched == -torch.inf).any(1).all()
    for row in (0, 3):
        single, own = logits[row : row + 1].clone(), slice(700 * row, 700 * row + 700)
        add_logit_bias_(single, rows[own] * 0, tokens[own], values[own])
        assert torch.equal(single[0], batched[row])


def test_tokens_beyond_the_history_are_not_read(device: torch.device) -> None:
    """Tokens outside `tokens` are not read, even if a row's end exceeds the width of `tokens`.

    Invalid token ids are ignored.
    """
    memory = torch.full((2, 64), 3, device=device)
    tokens = memory[:1, :20]
    tokens[:] = torch.tensor([5, 50, -1, 5], device=device).repeat(5)
    logits, one = torch.full((1, 50), 8.0, device=device), torch.ones(1, device=device)
    starts, ends = (torch.tensor([number], device=device) for number in (0, 1 << 40))
    apply_penalties_(logits, tokens, starts, ends, Penalties(2 * one, one, 0 * one))
    assert logits[0, 5] == 3
    assert (logits[0, torch.arange(50, device=device) != 5] == 8).all()


def test_biases_of_unknown_rows_and_tokens_are_ignored(device: torch.device) -> None:
    wide = torch.zeros(3, 70, device=device)
    logits = wide[:, :50]
    rows = torch.tensor([0, 2, 1, -1, 3, 1, 1], device=device)
    tokens = torch.tensor([49, 0, 7, 3, 3, 50, -2], device=device)
    values = torch.tensor([1.5, -torch.inf, -2, 9, 9, 9, 9], device=device)
    add_logit_bias_(logits, rows, tokens, values)
    assert wide.nonzero().tolist() == [[0, 49], [1, 7], [2, 0]]
    assert wide[[0, 1, 2], [49, 7, 0]].tolist() == [1.5, -2, -torch.inf]


def test_invalid_arguments_are_refused(device: torch.device) -> None:
    logits, ints = (
        torch.zeros(3, 50, device=device),
        torch.zeros(2, dtype=torch.int64, device=device),
    )
    with pytest.raises(ValueError, match=r"values has dtype .*: expected float32"):
        add_logit_bias_(logits, ints, ints, ints)
    with pytest.raises(ValueError, match=r"logits has dtype .*: expected float32"):
        add_logit_bias_(logits.half(), ints, ints, ints.float())
