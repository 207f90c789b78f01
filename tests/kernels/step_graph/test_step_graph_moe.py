"""Compares MoE layers in CPU step graphs with `route` and `moe_forward`."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.activation.op import sigmoid, silu_and_mul
from penstock.kernels.linear.cpu_packed_f32 import PackedLinearF32, pack_f32
from penstock.kernels.linear.cpu_packed_int8 import has_int8_loops
from penstock.kernels.linear.op import pack_int8
from penstock.kernels.moe.expert_loop import moe_forward
from penstock.kernels.moe.routing import Routing, route, route_reference
from penstock.kernels.step_graph.builder import GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.graph import CpuStepGraph
from penstock.kernels.step_graph.layout import Buffer, ExpertLayout
from penstock.kernels.step_graph.opcodes import (
    ALIGNMENT,
    MATMUL_F32,
    NEXT,
    OPCODE,
    PERMUTE_INDEX,
)
from tests.support.threads import threads

ROWS = (1, 2, 9, 17, 64, 100)
MIXTURES = [(4, 2), (8, 8), (33, 3), (1, 1)]  # (number of experts, top_k)
DIM, INNER = 64, 96


@pytest.fixture(params=[1, 2, 3], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with threads(request.param):
        yield request.param


def make_builder(max_rows: int = 100) -> GraphBuilder:
    return GraphBuilder(max_rows, torch.zeros(1, 2, max_rows, 1, 1, 8))


def run_graph(graph: CpuStepGraph, inputs: dict[Buffer, Tensor]) -> int:
    """Run the graph on `inputs`; return the number of input rows."""
    num_rows = len(next(iter(inputs.values())))
    for buffer, values in inputs.items():
        graph.view(buffer, num_rows).copy_(values)
    slots = np.arange(num_rows)
    graph.run(slots, slots * 0 + 1, np.zeros((num_rows, 1), np.int32))
    return num_rows


def expert_rows(graph: CpuStepGraph, layout: ExpertLayout, num_rows: int) -> tuple[Tensor, ...]:
    """Return each expert's first row and row count, both [E], and the row of each choice [T, k]."""
    ints, num_experts = torch.from_numpy(graph.ints), layout.num_experts
    starts = ints[layout.at :][:num_experts]
    counts = ints[layout.at + num_experts :][:num_experts]
    choices = ints[layout.choices :][: num_rows * layout.top_k].view(num_rows, layout.top_k)
    return starts.clone(), counts.clone(), choices.clone()


def chosen_experts(graph: CpuStepGraph, layout: ExpertLayout, num_rows: int) -> Tensor:
    """Return each token's experts [T, k], derived from the rows of its choices."""
    starts, counts, choices = expert_rows(graph, layout, num_rows)
    expert_of_row = torch.full((layout.num_rows(100 + -100 % ALIGNMENT),), -1)
    for expert in range(layout.num_experts):
        expert_of_row[starts[expert] : starts[expert] + counts[expert]] = expert
    return expert_of_row[choices]


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("dim", "num_outputs"), [(64, 1), (90, 5), (512, 33)])
def test_gemv(num_rows: int, dim: int, num_outputs: int) -> None:
    builder = make_builder()
    x, out = builder.alloc(dim), builder.alloc(num_outputs)
    weight, values = torch.randn(num_outputs, dim), torch.randn(num_rows, dim)
    builder.gemv(x, weight, out)
    graph = builder.build()
    run_graph(graph, {x: values})
    expected = (values.double() @ weight.double().T).float()
    torch.testing.assert_close(graph.view(out, num_rows), expected, rtol=1e-5, atol=1e-4)


def routing_graph(
    num_experts: int, top_k: int, normalise: bool
) -> tuple[CpuStepGraph, ExpertLayout, Buffer, Buffer]:
    builder = make_builder()
    layout, logits = builder.expert_layout(num_experts, top_k), builder.alloc(num_experts)
    weights = builder.alloc(top_k)
    builder.topk_softmax(logits, layout, normalise, weights)
    return builder.build(), layout, logits, weights


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_experts", "top_k"), MIXTURES)
@pytest.mark.parametrize("normalise", [True, False])
def test_top_k_softmax_chooses_as_route(
    num_rows: int, num_experts: int, top_k: int, normalise: bool
) -> None:
    graph, layout, logits, weights = routing_graph(num_experts, top_k, normalise)
    values = 3 * torch.randn(num_rows, num_experts)
    run_graph(graph, {logits: values})
    experts, expected = route(values, Routing(top_k, normalise))
    assert torch.equal(chosen_experts(graph, layout, num_rows), experts)
    torch.testing.assert_close(graph.view(weights, num_rows), expected, rtol=1e-5, atol=1e-7)


def test_ties_go_to_the_lower_expert() -> None:
    graph, layout, logits, weights = routing_graph(6, 3, True)
    values = torch.tensor([[0.0] * 6, [1, 2, 2, 1, 2, 2], [-torch.inf, 0, -torch.inf, 0, 0, 0]])
    run_graph(graph, {logits: values})
    experts, expected = route_reference(values, Routing(3, True))
    assert experts.tolist() == [[0, 1, 2], [1, 2, 4], [1, 3, 4]]
    assert torch.equal(chosen_experts(graph, layout, 3), experts)
    torch.testing.assert_close(graph.view(weights, 3), expected)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 100), st.integers(1, 12), st.integers(1, 12), st.integers(0, 3), st.integers(0)
)  # fmt: skip
def test_rows_of_experts_do_not_overlap_and_keep_the_order_of_choices(
    num_rows: int, num_experts: int, top_k: int, uneven: int, seed: int
) -> None:
    """An expert's rows must begin after the padding that follows the previous expert's rows."""
    torch.manual_seed(seed % 2**63)
    top_k = min(top_k, num_experts)
    graph, layout, logits, _ = routing_graph(num_experts, top_k, False)
    values = torch.randn(num_rows, num_experts) - uneven * torch.arange(num_experts)
    run_graph(graph, {logits: values})
    starts, counts, choices = expert_rows(graph, layout, num_rows)
    experts, end = route(values, Routing(top_k))[0].flatten(), 0
    for expert in range(num_experts):
        rows = choices.flatten()[experts == expert].tolist()
        assert rows == list(range(starts[expert], starts[expert] + counts[expert]))
        assert starts[expert] >= end
        step = 1 if len(rows) == 1 else 8 if len(rows) <= 16 else ALIGNMENT
        end = int(starts[expert]) + -(-len(rows) // step) * step
    assert end <= layout.num_rows(num_rows)


def packed(num_experts: int, num_inputs: int, num_outputs: int) -> list[PackedLinearF32]:
    return [
        pack_f32(torch.randn(num_outputs, num_inputs), torch.randn(num_outputs))
        for _ in range(num_experts)
    ]


def check_experts(each: list[Any], top_k: int, num_rows: int) -> None:
    """Compare expert linears with `moe_forward`; leave out gates, which use another `exp`."""
    num_experts, builder = len(each), make_builder()
    layout, logits = builder.expert_layout(num_experts, top_k), builder.alloc(num_experts)
    x, out, weights = builder.alloc(192), builder.alloc(192), builder.alloc(top_k)
    permuted, expert_out = builder.alloc(192, layout), builder.alloc(192, layout)
    builder.topk_softmax(logits, layout, True, weights)
    builder.permute(x, layout, permuted)
    builder.expert_linears(permuted, each, expert_out, layout)
    builder.unpermute_sum(expert_out, layout, weights, out)
    graph = builder.build()
    for _ in range(2):  # run twice: the second run overwrites the buffers of the first
        values, scores = torch.randn(num_rows, 192), torch.randn(num_rows, num_experts)
        run_graph(graph, {x: values, logits: scores})
        experts, probs = chosen_experts(graph, layout, num_rows), graph.view(weights, num_rows)
        expected = moe_forward(values, experts, probs, num_experts, lambda e, rows: each[e](rows))
        assert torch.equal(graph.view(out, num_rows), expected)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_experts", "top_k"), MIXTURES)
def test_experts_have_the_bits_of_moe_forward(num_rows: int, num_experts: int, top_k: int) -> None:
    check_experts(packed(num_experts, 192, 192), top_k, num_rows)


@pytest.mark.skipif(not has_int8_loops(), reason="needs AVX2 or VNNI")
@pytest.mark.parametrize("num_rows", ROWS)
def test_int8_experts_have_the_bits_of_moe_forward(num_rows: int) -> None:
    experts = [pack_int8(torch.randn(192, 192), torch.randn(192)) for _ in range(5)]
    check_experts(experts, 2, num_rows)


@pytest.mark.skipif(not has_int8_loops(), reason="needs AVX2 or VNNI")
def test_experts_with_different_packing_are_refused() -> None:
    builder = make_builder()
    layout, f32 = builder.expert_layout(2, 1), packed(1, 64, 64)
    x, y = builder.alloc(64, layout), builder.alloc(64, layout)
    with pytest.raises(UnsupportedGraph, match="different types"):
        builder.expert_linears(x, [*f32, pack_int8(torch.randn(64, 64), None)], y, layout)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("gated", [True, False])
def test_moe_layer_with_a_shared_expert(num_rows: int, gated: bool) -> None:
    builder, first, second = make_builder(), packed(5, DIM, 2 * INNER), packed(5, INNER, DIM)
    layout, logits, weights = builder.expert_layout(5, 2), builder.alloc(5), builder.alloc(2)
    x, out, shared, gate = (builder.alloc(width) for width in (DIM, DIM, DIM, 1))
    permuted, both, inner, expert_out = (
        builder.alloc(width, layout) for width in (DIM, 2 * INNER, INNER, DIM)
    )
    router = torch.randn(5, DIM) / 8
    builder.gemv(x, router, logits)
    builder.topk_softmax(logits, layout, False, weights)
    builder.permute(x, layout, permuted)
    builder.expert_linears(permuted, first, both, layout)
    builder.gate(both, "silu", inner, layout)
    builder.expert_linears(inner, second, expert_out, layout)
    builder.unpermute_sum(expert_out, layout, weights, out, shared, gate if gated else None)
    graph = builder.build()
    values, others = torch.randn(num_rows, DIM), torch.randn(num_rows, DIM)
    gate_logits = 3 * torch.randn(num_rows, 1)
    run_graph(graph, {x: values, shared: others, gate: gate_logits})

    def run(expert: int, rows: Tensor) -> Tensor:
        return second[expert](silu_and_mul(first[expert](rows)))

    experts = chosen_experts(graph, layout, num_rows)
    expected = moe_forward(values, experts, graph.view(weights, num_rows), 5, run)
    expected += sigmoid(gate_logits) * others if gated else others
    assert torch.equal(experts, route(values @ router.T, Routing(2))[0])
    torch.testing.assert_close(graph.view(out, num_rows), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_rows_with_nan_or_inf_do_not_affect_other_rows(broken: float) -> None:
    builder, each = make_builder(), packed(4, DIM, 64)
    layout, logits, weights = builder.expert_layout(4, 2), builder.alloc(4), builder.alloc(2)
    x, out = builder.alloc(DIM), builder.alloc(64)
    permuted, expert_out = builder.alloc(DIM, layout), builder.alloc(64, layout)
    builder.topk_softmax(logits, layout, True, weights)
    builder.permute(x, layout, permuted)
    builder.expert_linears(permuted, each, expert_out, layout)
    builder.unpermute_sum(expert_out, layout, weights, out)
    graph = builder.build()
    values, scores = torch.randn(17, DIM), torch.randn(17, 4)
    run_graph(graph, {x: values, logits: scores})
    expected = graph.view(out, 17).clone()
    values[5], scores[5] = broken, broken
    run_graph(graph, {x: values, logits: scores})
    experts, found = chosen_experts(graph, layout, 17), graph.view(out, 17)
    assert experts[5].tolist() == [0, 1]
    others = torch.arange(17) != 5
    torch.testing.assert_close(found[others], expected[others], rtol=1e-5, atol=1e-4)
    assert found[5].isfinite().logical_not().any()


def test_expert_weights_are_not_prefetched_before_tokens_are_sorted() -> None:
    builder, plain = make_builder(), pack_f32(torch.randn(64, DIM), None)
    layout, logits, weights = builder.expert_layout(3, 1), builder.alloc(3), builder.alloc(1)
    x, permuted, expert_out = (
        builder.alloc(DIM),
        builder.alloc(DIM, layout),
        builder.alloc(64, layout),
    )
    builder.add(x, x)
    builder.linear(x, plain, x)
    builder.topk_softmax(logits, layout, True, weights)
    builder.permute(x, layout, permuted)
    builder.expert_linears(permuted, packed(3, DIM, 64), expert_out, layout)
    table = builder.build().table
    kinds = table[:, OPCODE].tolist()
    sort_at = kinds.index(PERMUTE_INDEX)
    assert table[: sort_at + 1, NEXT].tolist() == [1, -1, -1, -1]
    assert table[sort_at + 1, NEXT] == kinds.index(MATMUL_F32, sort_at)


def test_dense_weights_are_prefetched_while_experts_are_chosen() -> None:
    builder, plain = make_builder(), pack_f32(torch.randn(64, DIM), None)
    layout, logits, weights = builder.expert_layout(3, 1), builder.alloc(3), builder.alloc(1)
    x = builder.alloc(DIM)
    builder.topk_softmax(logits, layout, True, weights)
    builder.linear(x, plain, x)
    assert builder.build().table[:, NEXT].tolist() == [2, 2, -1]


def test_prefetch_skips_experts_without_rows() -> None:
    from penstock.kernels.step_graph import interpreter

    loops: Any = interpreter
    builder = make_builder()
    layout, x = builder.expert_layout(4, 1), builder.alloc(64)
    builder.expert_linears(x, packed(4, 64, 64), x, layout)
    graph = builder.build()
    graph.ints[layout.rows(2).count] = 1
    assert loops._next_matmul.py_func(graph.table, graph.ints, 0) == 2
    assert loops._next_matmul.py_func(graph.table, graph.ints, -1) == -1
