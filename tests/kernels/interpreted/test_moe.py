"""The Triton kernels of MoE layers: grouped products of all experts."""

import pytest
import torch

from penstock.kernels.moe import triton as module
from penstock.kernels.moe.op import (
    ExpertWeights,
    GatedActivation,
    grouped_moe_forward,
    grouped_moe_forward_reference,
)
from penstock.kernels.moe.routing import Routing, route
from tests.support.devices import DTYPES, ON_GPU
from tests.support.poison import poisoned_memory

GATES = [GatedActivation("silu"), GatedActivation("gelu"), GatedActivation("clamped", 1.702, 7.0)]


def make_experts(
    gate: GatedActivation,
    num_experts: int,
    dim: int,
    inner: int,
    dtype: torch.dtype,
    device: torch.device,
) -> ExpertWeights:
    """Return expert weights: [E, out, in], or for "clamped" [E, in, out] with biases."""

    def random(*shape: int, by: float) -> torch.Tensor:
        return torch.randn(shape).div(by**0.5).to(device, dtype)

    if gate.kind == "clamped":
        return ExpertWeights(
            random(num_experts, dim, 2 * inner, by=dim),
            random(num_experts, inner, dim, by=inner),
            gate,
            random(num_experts, 2 * inner, by=1),
            random(num_experts, dim, by=1),
        )
    gate_up, down = (
        random(num_experts, 2 * inner, dim, by=dim),
        random(num_experts, dim, inner, by=inner),
    )
    return ExpertWeights(gate_up.transpose(1, 2), down.transpose(1, 2), gate)


def on_cpu(params: ExpertWeights) -> ExpertWeights:
    biases = (None if b is None else b.cpu() for b in (params.gate_up_bias, params.down_bias))
    return ExpertWeights(params.gate_up.cpu(), params.down.cpu(), params.gate, *biases)


def check(
    x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, params: ExpertWeights
) -> None:
    with poisoned_memory():
        found = grouped_moe_forward(x, experts, weights, params)
    expected = grouped_moe_forward_reference(x.cpu(), experts.cpu(), weights.cpu(), on_cpu(params))
    eps = torch.finfo(x.dtype).eps
    torch.testing.assert_close(found.cpu().double(), expected, rtol=4 * eps, atol=4 * eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", GATES)
def test_matches_the_reference(
    device: torch.device, dtype: torch.dtype, gate: GatedActivation
) -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 70).to(device, dtype)
    routed = route(torch.randn(7, 5, device=device), Routing(2, True))
    check(x, *routed, make_experts(gate, 5, 70, 35, dtype, device))


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("num_tokens", [1, 20, 65])
def test_any_number_of_rows_per_expert(device: torch.device, num_tokens: int, top_k: int) -> None:
    """The number of rows of an expert is below, near or above each of the three tile sizes."""
    torch.manual_seed(num_tokens)
    x = torch.randn(num_tokens, 24).to(device, torch.float16)
    routed = route(torch.randn(num_tokens, 3, device=device), Routing(top_k))
    check(x, *routed, make_experts(GatedActivation("silu"), 3, 24, 16, torch.float16, device))


def test_all_tokens_to_one_expert(device: torch.device) -> None:
    x = torch.randn(130, 16).to(device, torch.float16)
    experts = torch.full((130, 1), 1, dtype=torch.int32, device=device)
    weights = torch.rand(130, 1, device=device)
    check(
        x, experts, weights, make_experts(GatedActivation("silu"), 2, 16, 8, torch.float16, device)
    )


def test_tile_sizes() -> None:
    half = torch.float16
    assert module.tiles_for(half, 0.1, False) == module.tiles_for(half, 16, False) == module.FEW
    assert module.tiles_for(half, 64, False) == module.SOME
    assert module.tiles_for(half, 65, False) == module.MANY
    assert {module.tiles_for(half, mean, True) for mean in (0.1, 30, 900)} == {module.SOME}


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_token_do_not_depend_on_the_batch(
    device: torch.device, dtype: torch.dtype
) -> None:
    torch.manual_seed(2)
    x, weights = torch.randn(90, 40).to(device, dtype), torch.rand(90, 2, device=device)
    params = make_experts(GatedActivation("gelu"), 3, 40, 24, dtype, device)
    experts = torch.tensor([[2, 0]], dtype=torch.int32, device=device).repeat(90, 1)
    batched = grouped_moe_forward(x, experts, weights, params, fixed_tiles=True)
    # The interpreter multiplies with numpy, whose rounding depends on the position in the tile.
    for at in (slice(64, 65), slice(64, 90), *((slice(7, 8), slice(20, 90)) if ON_GPU else ())):
        single = grouped_moe_forward(x[at], experts[at], weights[at], params, fixed_tiles=True)
        assert torch.equal(single, batched[at])


@pytest.mark.parametrize("gate", GATES)
def test_a_token_with_nan_does_not_affect_others(
    device: torch.device, gate: GatedActivation
) -> None:
    torch.manual_seed(3)
    x = torch.randn(6, 20, device=device)
    experts, weights = route(torch.randn(6, 3, device=device), Routing(2))
    x[1], x[4, 3], weights[2, 0] = torch.nan, torch.nan, torch.nan
    found = grouped_moe_forward(
        x, experts, weights, make_experts(gate, 3, 20, 8, torch.float32, device)
    )
    assert found.isfinite().all(-1).tolist() == [True, False, False, True, False, True]


def test_no_tokens(device: torch.device) -> None:
    params = make_experts(GATES[0], 3, 20, 8, torch.float32, device)
    none = torch.empty(0, 2, device=device)
    assert grouped_moe_forward(none.new_empty(0, 20), none.int(), none, params).shape == (0, 20)


def test_invalid_arguments_are_refused(device: torch.device) -> None:
    x = torch.randn(2, 20, device=device)
    params = make_experts(GATES[0], 3, 20, 8, torch.float32, device)
    experts = torch.zeros(2, 1, dtype=torch.int32, device=device)
    weights = torch.ones(2, 1, device=device)
    with pytest.raises(ValueError, match=r"experts has dtype .*: expected int32"):
        grouped_moe_forward(x, experts.long(), weights, params)
    with pytest.raises(ValueError, match="weights has shape"):
        grouped_moe_forward(x, experts, weights[:1], params)
    with pytest.raises(ValueError, match=r"gate_up has dtype .*: expected float16"):
        grouped_moe_forward(x.half(), experts, weights, params)
    wrong = ExpertWeights(params.gate_up, params.down, GATES[0], None, torch.zeros(3, 8))
    with pytest.raises(ValueError, match="down_bias has shape"):
        grouped_moe_forward(x, experts, weights, wrong)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("fixed_tiles", [False, True])
def test_choices_of_experts_elsewhere_add_nothing(
    device: torch.device, gate: GatedActivation, fixed_tiles: bool
) -> None:
    """Two ranks hold two and three experts; their results add up to the result of one rank."""
    torch.manual_seed(4)
    x = torch.randn(20, 24, device=device)
    experts, weights = route(torch.randn(20, 5, device=device), Routing(2))
    whole = make_experts(gate, 5, 24, 16, torch.float32, device)

    def compute(first: int, last: int, bias: bool) -> torch.Tensor:
        part = slice(first, last)
        biases = (whole.gate_up_bias, whole.down_bias)
        own = [None if each is None else each[part] for each in biases]
        stacks = ExpertWeights(
            whole.gate_up[part], whole.down[part], gate, own[0], own[1] if bias else None
        )
        with poisoned_memory():  # kernels do not write outputs of experts that this rank lacks
            return grouped_moe_forward(x, experts - first, weights, stacks, fixed_tiles, 5)

    found = compute(0, 2, True) + compute(2, 5, True)
    expected = grouped_moe_forward_reference(x.cpu(), experts.cpu(), weights.cpu(), on_cpu(whole))
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    absent = (experts >= 2).all(1)
    assert absent.any()
    assert not compute(0, 2, False)[absent].any()
    none = torch.full_like(experts, 7)
    one = ExpertWeights(whole.gate_up[:2], whole.down[:2], GatedActivation("silu"))
    assert not grouped_moe_forward(x, none, weights, one, fixed_tiles, 5).any()
