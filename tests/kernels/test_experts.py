"""Routing and mixing of experts against their references."""

import pytest
import torch

from penstock.kernels.experts import (
    Routing,
    mix_experts,
    mix_experts_reference,
    route,
)

NUM_EXPERTS = 5


@pytest.mark.parametrize("normalise", [False, True])
def test_the_likeliest_are_chosen(normalise: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 3.5]])
    experts, weights = route(logits, Routing(2, normalise))
    assert experts.tolist() == [[1, 2], [2, 0]]
    expected = logits.softmax(-1).gather(1, experts)
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("top_k", [1, 2, NUM_EXPERTS])
def test_mixing(top_k: int) -> None:
    torch.manual_seed(top_k)
    x, matrices = torch.randn(11, 6), torch.randn(NUM_EXPERTS, 6, 6)
    experts, weights = route(torch.randn(11, NUM_EXPERTS), Routing(top_k, True))

    def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
        return rows @ matrices[expert]

    found = mix_experts(x, experts, weights, NUM_EXPERTS, run)
    expected = mix_experts_reference(x, experts, weights, NUM_EXPERTS, run)
    torch.testing.assert_close(found, expected)


def test_a_neighbour_that_is_not_finite_harms_nobody() -> None:
    torch.manual_seed(0)
    x, matrices = torch.randn(4, 6), torch.randn(NUM_EXPERTS, 6, 6)
    x[2] = torch.nan
    experts, weights = route(torch.randn(4, NUM_EXPERTS), Routing(2))
    out = mix_experts(x, experts, weights, NUM_EXPERTS, lambda e, rows: rows @ matrices[e])
    assert torch.isfinite(out).all(-1).tolist() == [True, True, False, True]
