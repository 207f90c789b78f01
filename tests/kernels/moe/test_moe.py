"""Compares MoE layers on a CPU with their references."""

import pytest
import torch

from penstock.kernels.moe.expert_loop import moe_forward, moe_forward_reference
from penstock.kernels.moe.op import (
    ExpertWeights,
    GatedActivation,
    grouped_moe_forward,
    grouped_moe_forward_reference,
)
from penstock.kernels.moe.routing import Routing, route

NUM_EXPERTS = 5


@pytest.mark.parametrize("top_k", [1, 2, NUM_EXPERTS])
def test_moe_forward_matches_the_reference(top_k: int) -> None:
    torch.manual_seed(top_k)
    x, matrices = torch.randn(11, 6), torch.randn(NUM_EXPERTS, 6, 6)
    experts, weights = route(torch.randn(11, NUM_EXPERTS), Routing(top_k, True))

    def run(expert: int, rows: torch.Tensor) -> torch.Tensor:
        return rows @ matrices[expert]

    found = moe_forward(x, experts, weights, NUM_EXPERTS, run)
    expected = moe_forward_reference(x, experts, weights, NUM_EXPERTS, run)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("is_grouped", [False, True])
def test_choices_of_experts_elsewhere_add_nothing(is_grouped: bool) -> None:
    """Two ranks hold two and three experts; their results add up to the result of one rank."""
    torch.manual_seed(1)
    x = torch.randn(11, 6)
    experts, weights = route(torch.randn(11, NUM_EXPERTS), Routing(3))
    gate_up, down = torch.randn(NUM_EXPERTS, 6, 14), torch.randn(NUM_EXPERTS, 7, 6)

    def compute(first: int, last: int) -> torch.Tensor:
        stacks = ExpertWeights(gate_up[first:last], down[first:last], GatedActivation("silu"))
        here = experts - first
        if is_grouped:
            return grouped_moe_forward(x, here, weights, stacks, num_divided=NUM_EXPERTS)
        return moe_forward(x, here, weights, last - first, stacks.expert, partial=True)

    found = [compute(0, 2), compute(2, NUM_EXPERTS)]
    whole = ExpertWeights(gate_up, down, GatedActivation("silu"))
    expected = grouped_moe_forward_reference(x, experts, weights, whole)
    assert not torch.allclose(found[0].double(), expected, rtol=0.1)
    torch.testing.assert_close((found[0] + found[1]).double(), expected, rtol=1e-4, atol=1e-4)
    absent = (experts >= 2).all(1)
    assert absent.any()
    assert not found[0][absent].any()


def test_a_row_with_nan_does_not_affect_other_rows() -> None:
    torch.manual_seed(0)
    x, matrices = torch.randn(4, 6), torch.randn(NUM_EXPERTS, 6, 6)
    x[2] = torch.nan
    experts, weights = route(torch.randn(4, NUM_EXPERTS), Routing(2))
    out = moe_forward(x, experts, weights, NUM_EXPERTS, lambda e, rows: rows @ matrices[e])
    assert torch.isfinite(out).all(-1).tolist() == [True, True, False, True]


@pytest.mark.parametrize(
    "gate", [GatedActivation("silu"), GatedActivation("gelu"), GatedActivation("clamped", 1.7, 7.0)]
)
def test_grouped_moe_forward_matches_the_reference(gate: GatedActivation) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 6)
    experts, weights = route(torch.randn(9, NUM_EXPERTS), Routing(2))
    biases = (torch.randn(NUM_EXPERTS, 14), torch.randn(NUM_EXPERTS, 6))
    stacks = ExpertWeights(
        torch.randn(NUM_EXPERTS, 6, 14), torch.randn(NUM_EXPERTS, 7, 6), gate, *biases
    )
    found = grouped_moe_forward(x, experts, weights, stacks)
    expected = grouped_moe_forward_reference(x, experts, weights, stacks)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
