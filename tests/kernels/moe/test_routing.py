"""Compares routing to experts on a CPU with its reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.moe.routing import Routing, route, route_reference
from tests.support.routings import routings


@pytest.mark.parametrize("normalise", [False, True])
def test_experts_with_the_highest_logits_are_chosen(normalise: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 3.5]])
    experts, weights = route(logits, Routing(2, normalise))
    assert experts.tolist() == [[1, 2], [2, 0]]
    expected = logits.softmax(-1).gather(1, experts)
    if normalise:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(weights, expected)


@settings(max_examples=60, deadline=None)
@given(routings(), st.booleans(), st.integers(0, 100))
def test_matches_the_reference_for_any_routing(
    found: tuple[Routing, int], biased: bool, seed: int
) -> None:
    routing, num_experts = found
    torch.manual_seed(seed)
    logits = torch.randn(9, num_experts) * 2
    bias = torch.randn(num_experts) if biased else None
    experts, weights = route(logits, routing, bias)
    expected, expected_weights = route_reference(logits, routing, bias)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, expected_weights)


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    bias = torch.tensor([5.0, 0.0, -5.0])
    experts, weights = route(logits, Routing(2, sigmoid=True), bias)
    assert experts.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, logits[:, :2].sigmoid())


def test_experts_are_chosen_from_the_best_groups_only() -> None:
    logits = torch.tensor([[9.0, 0.0, 1.0, 2.0, 6.0, 6.0]])
    one = Routing(2, num_groups=3, top_groups=1)
    assert route(logits, one)[0].tolist() == [[0, 1]]
    two_together = Routing(2, sigmoid=True, num_groups=3, top_groups=1, group_best=2)
    assert sorted(route(logits, two_together)[0].tolist()[0]) == [4, 5]
