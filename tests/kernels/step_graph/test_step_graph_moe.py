"""Mixtures of experts in programs of a CPU: what `route` chooses and `moe_forward` sums."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.activation.op import sigmoid, silu_and_mul
from penstock.kernels.linear.cpu_packed_f32 import PackedLinearF32, has_amx, pack_f32
from penstock.kernels.linear.op import pack_int8
from penstock.kernels.moe.op import moe_forward
from penstock.kernels.moe.routing import Routing, route, route_reference
from penstock.kernels.step_graph.builder import Buffer, CpuStepGraph, GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.layout import ExpertLayout
from penstock.kernels.step_graph.opcodes import ALIGNMENT, NEXT, PRODUCT, SORT
from tests.support.threads import threads

ROWS = (1, 2, 9, 17, 64, 100)
MIXTURES = [(4, 2), (8, 8), (33, 3), (1, 1)]  # experts, and how many a token has
DIM, INNER = 64, 96


@pytest.fixture(params=[1, 2, 3], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with threads(request.param):
        yield request.param


def writer_of(most_rows: int = 100) -> GraphBuilder:
    return GraphBuilder(most_rows, torch.zeros(1, 2, most_rows, 1, 1, 8))


def play(program: CpuStepGraph, given: dict[Buffer, Tensor]) -> int:
    """Plays it, of so many rows as are given, which it returns."""
    num_rows = len(next(iter(given.values())))
    for place, values in given.items():
        program.view(place, num_rows).copy_(values)
    slots = np.arange(num_rows)
    program.run(slots, slots * 0 + 1, np.zeros((num_rows, 1), np.int32))
    return num_rows


def numbers_of(program: CpuStepGraph, spread: ExpertLayout, num_rows: int) -> tuple[Tensor, ...]:
    """Where each expert's rows begin, how many they are, and the rows of choices [T, k]."""
    ints, num_experts = torch.from_numpy(program.ints), spread.num_experts
    starts = ints[spread.at :][:num_experts]
    counts = ints[spread.at + num_experts :][:num_experts]
    choices = ints[spread.choices :][: num_rows * spread.top_k].view(num_rows, spread.top_k)
    return starts.clone(), counts.clone(), choices.clone()


def experts_of(program: CpuStepGraph, spread: ExpertLayout, num_rows: int) -> Tensor:
    """Each token's experts [T, k], by the rows that their choices have."""
    starts, counts, choices = numbers_of(program, spread, num_rows)
    owner = torch.full((spread.num_rows(100 + -100 % ALIGNMENT),), -1)
    for expert in range(spread.num_experts):
        owner[starts[expert] : starts[expert] + counts[expert]] = expert
    return owner[choices]


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("dim", "num_outputs"), [(64, 1), (90, 5), (512, 33)])
def test_a_score(num_rows: int, dim: int, num_outputs: int) -> None:
    writer = writer_of()
    x, out = writer.alloc(dim), writer.alloc(num_outputs)
    weight, values = torch.randn(num_outputs, dim), torch.randn(num_rows, dim)
    writer.gemv(x, weight, out)
    program = writer.build()
    play(program, {x: values})
    expected = (values.double() @ weight.double().T).float()
    torch.testing.assert_close(program.view(out, num_rows), expected, rtol=1e-5, atol=1e-4)


def chooser(
    num_experts: int, top_k: int, normalise: bool
) -> tuple[CpuStepGraph, ExpertLayout, Buffer, Buffer]:
    writer = writer_of()
    spread, logits = writer.expert_layout(num_experts, top_k), writer.alloc(num_experts)
    weights = writer.alloc(top_k)
    writer.topk_softmax(logits, spread, normalise, weights)
    return writer.build(), spread, logits, weights


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_experts", "top_k"), MIXTURES)
@pytest.mark.parametrize("normalise", [True, False])
def test_a_choice(num_rows: int, num_experts: int, top_k: int, normalise: bool) -> None:
    program, spread, logits, weights = chooser(num_experts, top_k, normalise)
    values = 3 * torch.randn(num_rows, num_experts)
    play(program, {logits: values})
    experts, expected = route(values, Routing(top_k, normalise))
    assert torch.equal(experts_of(program, spread, num_rows), experts)
    torch.testing.assert_close(program.view(weights, num_rows), expected, rtol=1e-5, atol=1e-7)


def test_of_equal_experts_the_lower_is_chosen() -> None:
    program, spread, logits, weights = chooser(6, 3, True)
    values = torch.tensor([[0.0] * 6, [1, 2, 2, 1, 2, 2], [-torch.inf, 0, -torch.inf, 0, 0, 0]])
    play(program, {logits: values})
    experts, expected = route_reference(values, Routing(3, True))
    assert experts.tolist() == [[0, 1, 2], [1, 2, 4], [1, 3, 4]]
    assert torch.equal(experts_of(program, spread, 3), experts)
    torch.testing.assert_close(program.view(weights, 3), expected)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 100), st.integers(1, 12), st.integers(1, 12), st.integers(0, 3), st.integers(0)
)  # fmt: skip
def test_each_expert_has_rows_of_its_own_in_the_order_of_choices(
    num_rows: int, num_experts: int, top_k: int, uneven: int, seed: int
) -> None:
    """What loops may write beyond an expert's rows is nobody's, and there is room for it."""
    torch.manual_seed(seed % 2**63)
    top_k = min(top_k, num_experts)
    program, spread, logits, _ = chooser(num_experts, top_k, False)
    values = torch.randn(num_rows, num_experts) - uneven * torch.arange(num_experts)
    play(program, {logits: values})
    starts, counts, choices = numbers_of(program, spread, num_rows)
    experts, end = route(values, Routing(top_k))[0].flatten(), 0
    for expert in range(num_experts):
        rows = choices.flatten()[experts == expert].tolist()
        assert rows == list(range(starts[expert], starts[expert] + counts[expert]))
        assert starts[expert] >= end
        step = 1 if len(rows) == 1 else 8 if len(rows) <= 16 else ALIGNMENT
        end = int(starts[expert]) + -(-len(rows) // step) * step
    assert end <= spread.num_rows(num_rows)


def products(num_experts: int, num_inputs: int, num_outputs: int) -> list[PackedLinearF32]:
    return [
        pack_f32(torch.randn(num_outputs, num_inputs), torch.randn(num_outputs))
        for _ in range(num_experts)
    ]


def mixed(each: list[Any], top_k: int, num_rows: int) -> None:
    """Products alone: a gate's exponential is another."""
    num_experts, writer = len(each), writer_of()
    spread, logits = writer.expert_layout(num_experts, top_k), writer.alloc(num_experts)
    x, out, weights = writer.alloc(192), writer.alloc(192), writer.alloc(top_k)
    apart, made = writer.alloc(192, spread), writer.alloc(192, spread)
    writer.topk_softmax(logits, spread, True, weights)
    writer.permute(x, spread, apart)
    writer.expert_linears(apart, each, made, spread)
    writer.unpermute_sum(made, spread, weights, out)
    program = writer.build()
    for _ in range(2):  # the second time over what the first has left
        values, scores = torch.randn(num_rows, 192), torch.randn(num_rows, num_experts)
        play(program, {x: values, logits: scores})
        experts, shares = experts_of(program, spread, num_rows), program.view(weights, num_rows)
        expected = moe_forward(values, experts, shares, num_experts, lambda e, rows: each[e](rows))
        assert torch.equal(program.view(out, num_rows), expected)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_experts", "top_k"), MIXTURES)
def test_a_mixture_has_the_launchers_bits(num_rows: int, num_experts: int, top_k: int) -> None:
    mixed(products(num_experts, 192, 192), top_k, num_rows)


@pytest.mark.skipif(not has_amx(), reason="this machine has no matrix unit")
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_mixture_of_eight_bits_has_the_launchers_bits(num_rows: int) -> None:
    mixed([pack_int8(torch.randn(192, 192), torch.randn(192)) for _ in range(5)], 2, num_rows)


@pytest.mark.skipif(not has_amx(), reason="this machine has no matrix unit")
def test_products_of_several_kinds_are_refused() -> None:
    writer = writer_of()
    spread, few = writer.expert_layout(2, 1), products(1, 64, 64)
    x, y = writer.alloc(64, spread), writer.alloc(64, spread)
    with pytest.raises(UnsupportedGraph, match="kinds"):
        writer.expert_linears(x, [*few, pack_int8(torch.randn(64, 64), None)], y, spread)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("gated", [True, False])
def test_a_whole_layer_with_a_shared_expert(num_rows: int, gated: bool) -> None:
    writer, first, second = writer_of(), products(5, DIM, 2 * INNER), products(5, INNER, DIM)
    spread, logits, weights = writer.expert_layout(5, 2), writer.alloc(5), writer.alloc(2)
    x, out, shared, gate = (writer.alloc(width) for width in (DIM, DIM, DIM, 1))
    apart, both, inner, made = (
        writer.alloc(width, spread) for width in (DIM, 2 * INNER, INNER, DIM)
    )
    router = torch.randn(5, DIM) / 8
    writer.gemv(x, router, logits)
    writer.topk_softmax(logits, spread, False, weights)
    writer.permute(x, spread, apart)
    writer.expert_linears(apart, first, both, spread)
    writer.gate(both, "silu", inner, spread)
    writer.expert_linears(inner, second, made, spread)
    writer.unpermute_sum(made, spread, weights, out, shared, gate if gated else None)
    program = writer.build()
    values, others = torch.randn(num_rows, DIM), torch.randn(num_rows, DIM)
    doors = 3 * torch.randn(num_rows, 1)
    play(program, {x: values, shared: others, gate: doors})

    def run(expert: int, rows: Tensor) -> Tensor:
        return second[expert](silu_and_mul(first[expert](rows)))

    experts = experts_of(program, spread, num_rows)
    expected = moe_forward(values, experts, program.view(weights, num_rows), 5, run)
    expected += sigmoid(doors) * others if gated else others
    assert torch.equal(experts, route(values @ router.T, Routing(2))[0])
    torch.testing.assert_close(program.view(out, num_rows), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_harm_nobody_else(broken: float) -> None:
    writer, each = writer_of(), products(4, DIM, 64)
    spread, logits, weights = writer.expert_layout(4, 2), writer.alloc(4), writer.alloc(2)
    x, out = writer.alloc(DIM), writer.alloc(64)
    apart, made = writer.alloc(DIM, spread), writer.alloc(64, spread)
    writer.topk_softmax(logits, spread, True, weights)
    writer.permute(x, spread, apart)
    writer.expert_linears(apart, each, made, spread)
    writer.unpermute_sum(made, spread, weights, out)
    program = writer.build()
    values, scores = torch.randn(17, DIM), torch.randn(17, 4)
    play(program, {x: values, logits: scores})
    expected = program.view(out, 17).clone()
    values[5], scores[5] = broken, broken
    play(program, {x: values, logits: scores})
    experts, found = experts_of(program, spread, 17), program.view(out, 17)
    assert experts[5].tolist() == [0, 1]
    others = torch.arange(17) != 5
    torch.testing.assert_close(found[others], expected[others], rtol=1e-5, atol=1e-4)
    assert found[5].isfinite().logical_not().any()


def test_nobody_asks_for_weights_before_it_is_known_whose() -> None:
    writer, plain = writer_of(), pack_f32(torch.randn(64, DIM), None)
    spread, logits, weights = writer.expert_layout(3, 1), writer.alloc(3), writer.alloc(1)
    x, apart, made = writer.alloc(DIM), writer.alloc(DIM, spread), writer.alloc(64, spread)
    writer.add(x, x)
    writer.linear(x, plain, x)
    writer.topk_softmax(logits, spread, True, weights)
    writer.permute(x, spread, apart)
    writer.expert_linears(apart, products(3, DIM, 64), made, spread)
    table = writer.build().table
    kinds = table[:, 0].tolist()
    known = kinds.index(SORT)
    assert table[: known + 1, NEXT].tolist() == [1, -1, -1, -1]
    assert table[known + 1, NEXT] == kinds.index(PRODUCT, known)


def test_products_that_all_tokens_need_are_asked_for_while_experts_are_chosen() -> None:
    writer, plain = writer_of(), pack_f32(torch.randn(64, DIM), None)
    spread, logits, weights = writer.expert_layout(3, 1), writer.alloc(3), writer.alloc(1)
    x = writer.alloc(DIM)
    writer.topk_softmax(logits, spread, True, weights)
    writer.linear(x, plain, x)
    assert writer.build().table[:, NEXT].tolist() == [2, 2, -1]


def test_the_first_product_that_has_rows_is_asked_for() -> None:
    from penstock.kernels.step_graph import interpreter

    loops: Any = interpreter
    writer = writer_of()
    spread, x = writer.expert_layout(4, 1), writer.alloc(64)
    writer.expert_linears(x, products(4, 64, 64), x, spread)
    program = writer.build()
    program.ints[spread.rows(2).count] = 1
    assert loops._next_matmul.py_func(program.table, program.ints, 0) == 2
    assert loops._next_matmul.py_func(program.table, program.ints, -1) == -1
