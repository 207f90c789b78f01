"""The Triton kernel that routes tokens to experts."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.kernels.moe.routing import Routing, route, route_reference
from tests.support.poison import poisoned_memory
from tests.support.routings import routings


@settings(max_examples=12, derandomize=True)
@given(found=routings(), biased=st.booleans(), half=st.booleans(), seed=st.integers(0, 100))
def test_matches_the_reference_for_any_routing(
    device: torch.device, found: tuple[Routing, int], biased: bool, half: bool, seed: int
) -> None:
    routing, num_experts = found
    torch.manual_seed(seed)
    logits = (torch.randn(3, num_experts) * 2).to(torch.float16 if half else torch.float32)
    bias = torch.randn(num_experts) if biased else None
    with poisoned_memory():
        experts, weights = route(
            logits.to(device), routing, None if bias is None else bias.to(device)
        )
    expected, expected_weights = route_reference(logits, routing, bias)
    assert torch.equal(experts.cpu().long(), expected)
    torch.testing.assert_close(weights.cpu(), expected_weights)


def test_ties_go_to_the_lower_expert(device: torch.device) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 1.0, 2.0]], device=device)
    assert route(logits, Routing(4))[0].tolist() == [[1, 2, 4, 0]]


def test_a_token_with_nan_or_inf_gets_experts_and_does_not_affect_others(
    device: torch.device,
) -> None:
    torch.manual_seed(1)
    logits = torch.randn(4, 12)
    broken = logits.clone()
    broken[1], broken[2, 5] = torch.nan, torch.inf
    routing = Routing(3, True, True, 4, 2, 2)
    whole = route(logits.to(device), routing)
    found = route(broken.to(device), routing)
    for row in (0, 3):
        assert all(torch.equal(a[row], b[row]) for a, b in zip(found, whole, strict=True))
    for row in found[0].tolist():
        assert len(set(row)) == 3
        assert set(row) <= set(range(12))


@pytest.mark.parametrize(
    ("routing", "biased"),
    [(Routing(6, True), False), (Routing(4, True, True, 8, 4, 2, 2.5), True)],
    ids=["mixtral", "deepseek"],
)
def test_routing_of_a_token_does_not_depend_on_the_batch(
    device: torch.device, routing: Routing, biased: bool
) -> None:
    logits = torch.randn(5, 40, device=device)
    bias = torch.randn(40, device=device) if biased else None
    batched = route(logits, routing, bias)
    single = route(logits[3:4], routing, bias)
    assert all(torch.equal(a[0], b[3]) for a, b in zip(single, batched, strict=True))


def test_invalid_arguments_are_refused(device: torch.device) -> None:
    logits = torch.randn(2, 8, device=device)
    with pytest.raises(ValueError, match=r"routing.top_k is"):
        route(logits, Routing(5, num_groups=2))
    with pytest.raises(ValueError, match=r"num_groups is .*: expected a divisor"):
        route(logits, Routing(1, num_groups=3))
    with pytest.raises(ValueError, match="bias has shape"):
        route(logits, Routing(1), torch.zeros(7, device=device))
