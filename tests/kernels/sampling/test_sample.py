"""Sampling on a CPU: which rows are valid, and their tokens."""

import pytest
import torch
from torch import Tensor

from penstock.kernels.sampling.op import SamplingTensors, sample

BANNED = -torch.inf


def params(temperatures: list[float]) -> SamplingTensors:
    num_rows = len(temperatures)
    ones, zeros = torch.ones(num_rows), torch.zeros(num_rows)
    numbers = torch.zeros(num_rows, dtype=torch.int64)
    return SamplingTensors(
        torch.tensor(temperatures), ones, zeros, ones, numbers, numbers, numbers, numbers
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_choice_are_invalid(temperature: float) -> None:
    logits = torch.tensor(
        [
            [BANNED, 1.0, BANNED],
            [BANNED, BANNED, BANNED],
            [torch.nan, 1.0, 2.0],
            [BANNED, torch.inf, 1.0],
            [5.0, BANNED, BANNED],
        ]
    )
    tokens, valid = sampled(logits, [temperature] * 5)
    assert valid == [True, False, False, False, True]
    assert tokens == [1, 0, 0, 0, 0]


def test_row_whose_scores_overflow_is_invalid() -> None:
    """Divided by the temperature, all scores are -inf, so that the banned token is the first."""
    logits = torch.tensor([[BANNED, -3e38, -2e38]] * 2)
    assert sampled(logits, [1e-3, 0.0]) == ([0, 2], [False, True])


def sampled(logits: Tensor, temperatures: list[float]) -> tuple[list[int], list[bool]]:
    tokens, valid = sample(logits, params(temperatures), bans=True)
    return tokens.tolist(), valid.tolist()
