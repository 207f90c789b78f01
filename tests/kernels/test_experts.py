"""Mixing of experts against its references."""

import pytest
import torch

from penstock.kernels.experts import (
    Gate,
    Stacks,
    mix_experts,
    mix_experts_reference,
    mix_stacked,
    mix_stacked_reference,
)
from penstock.kernels.routing import Routing, route

NUM_EXPERTS = 5


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


@pytest.mark.parametrize("gate", [Gate("silu"), Gate("gelu"), Gate("clamped", 1.7, 7.0)])
def test_stacked_weights(gate: Gate) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 6)
    experts, weights = route(torch.randn(9, NUM_EXPERTS), Routing(2))
    biases = (torch.randn(NUM_EXPERTS, 14), torch.randn(NUM_EXPERTS, 6))
    stacks = Stacks(torch.randn(NUM_EXPERTS, 6, 14), torch.randn(NUM_EXPERTS, 7, 6), gate, *biases)
    found = mix_stacked(x, experts, weights, stacks)
    expected = mix_stacked_reference(x, experts, weights, stacks)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
