"""Routing and mixing of experts against their references."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.experts import (
    Routing,
    mix_experts,
    mix_experts_reference,
    route,
    route_reference,
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


@st.composite
def routings(draw: st.DrawFn) -> tuple[Routing, int]:
    """A routing, and a number of experts that it can be for."""
    num_groups, size = draw(st.integers(1, 6)), draw(st.integers(2, 5))
    top_groups = draw(st.integers(1, num_groups))
    routing = Routing(
        top_k=draw(st.integers(1, top_groups * size)),
        normalise=draw(st.booleans()),
        sigmoid=draw(st.booleans()),
        num_groups=num_groups,
        top_groups=top_groups,
        group_best=draw(st.integers(1, 2)),
        scale=draw(st.sampled_from([1.0, 2.5])),
    )
    return routing, num_groups * size


@settings(max_examples=60, deadline=None)
@given(routings(), st.booleans(), st.integers(0, 100))
def test_any_routing(found: tuple[Routing, int], biased: bool, seed: int) -> None:
    routing, num_experts = found
    torch.manual_seed(seed)
    logits = torch.randn(9, num_experts) * 2
    bias = torch.randn(num_experts) if biased else None
    experts, weights = route(logits, routing, bias)
    expected, shares = route_reference(logits, routing, bias)
    assert torch.equal(experts, expected)
    torch.testing.assert_close(weights, shares)


def test_a_bias_chooses_and_does_not_weigh() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    bias = torch.tensor([5.0, 0.0, -5.0])
    experts, weights = route(logits, Routing(2, sigmoid=True), bias)
    assert experts.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, logits[:, :2].sigmoid())


def test_only_the_best_groups_are_chosen_from() -> None:
    logits = torch.tensor([[9.0, 0.0, 1.0, 2.0, 6.0, 6.0]])
    one = Routing(2, num_groups=3, top_groups=1)
    assert route(logits, one)[0].tolist() == [[0, 1]]
    two_together = Routing(2, sigmoid=True, num_groups=3, top_groups=1, group_best=2)
    assert sorted(route(logits, two_together)[0].tolist()[0]) == [4, 5]


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
