"""Mixtures of experts in programs of a CPU: what `route` chooses and `mix_experts` sums."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.kernels.activation import sigmoid, silu_mul
from penstock.kernels.experts import mix_experts
from penstock.kernels.panel_product import PanelProduct, has_matrix_unit, panel_product
from penstock.kernels.products import int8_product
from penstock.kernels.program import Place, Program, Unfit, Writer
from penstock.kernels.program_rows import Spread
from penstock.kernels.program_table import EVEN, NEXT, PRODUCT, SORT
from penstock.kernels.routing import Routing, route, route_reference
from tests.support.threads import threads

ROWS = (1, 2, 9, 17, 64, 100)
MIXTURES = [(4, 2), (8, 8), (33, 3), (1, 1)]  # experts, and how many a token has
DIM, INNER = 64, 96


@pytest.fixture(params=[1, 2, 3], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with threads(request.param):
        yield request.param


def writer_of(most_rows: int = 100) -> Writer:
    return Writer(most_rows, torch.zeros(1, 2, most_rows, 1, 1, 8))


def play(program: Program, given: dict[Place, Tensor]) -> int:
    """Plays it, of so many rows as are given, which it returns."""
    num_rows = len(next(iter(given.values())))
    for place, values in given.items():
        program.matrix(place, num_rows).copy_(values)
    slots = np.arange(num_rows)
    program.play(slots, slots * 0 + 1, np.zeros((num_rows, 1), np.int32))
    return num_rows


def numbers_of(program: Program, spread: Spread, num_rows: int) -> tuple[Tensor, ...]:
    """Where each expert's rows begin, how many they are, and the rows of choices [T, k]."""
    ints, num_experts = torch.from_numpy(program.ints), spread.num_experts
    starts = ints[spread.at :][:num_experts]
    counts = ints[spread.at + num_experts :][:num_experts]
    choices = ints[spread.choices :][: num_rows * spread.top_k].view(num_rows, spread.top_k)
    return starts.clone(), counts.clone(), choices.clone()


def experts_of(program: Program, spread: Spread, num_rows: int) -> Tensor:
    """Each token's experts [T, k], by the rows that their choices have."""
    starts, counts, choices = numbers_of(program, spread, num_rows)
    owner = torch.full((spread.room(100 + -100 % EVEN),), -1)
    for expert in range(spread.num_experts):
        owner[starts[expert] : starts[expert] + counts[expert]] = expert
    return owner[choices]


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("dim", "num_outputs"), [(64, 1), (90, 5), (512, 33)])
def test_a_score(num_rows: int, dim: int, num_outputs: int) -> None:
    writer = writer_of()
    x, out = writer.place(dim), writer.place(num_outputs)
    weight, values = torch.randn(num_outputs, dim), torch.randn(num_rows, dim)
    writer.score(x, weight, out)
    program = writer.program()
    play(program, {x: values})
    expected = (values.double() @ weight.double().T).float()
    torch.testing.assert_close(program.matrix(out, num_rows), expected, rtol=1e-5, atol=1e-4)


def chooser(num_experts: int, top_k: int, normalise: bool) -> tuple[Program, Spread, Place, Place]:
    writer = writer_of()
    spread, logits = writer.spread(num_experts, top_k), writer.place(num_experts)
    weights = writer.place(top_k)
    writer.choose(logits, spread, normalise, weights)
    return writer.program(), spread, logits, weights


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_experts", "top_k"), MIXTURES)
@pytest.mark.parametrize("normalise", [True, False])
def test_a_choice(num_rows: int, num_experts: int, top_k: int, normalise: bool) -> None:
    program, spread, logits, weights = chooser(num_experts, top_k, normalise)
    values = 3 * torch.randn(num_rows, num_experts)
    play(program, {logits: values})
    experts, expected = route(values, Routing(top_k, normalise))
    assert torch.equal(experts_of(program, spread, num_rows), experts)
    torch.testing.assert_close(program.matrix(weights, num_rows), expected, rtol=1e-5, atol=1e-7)


def test_of_equal_experts_the_lower_is_chosen() -> None:
    program, spread, logits, weights = chooser(6, 3, True)
    values = torch.tensor([[0.0] * 6, [1, 2, 2, 1, 2, 2], [-torch.inf, 0, -torch.inf, 0, 0, 0]])
    play(program, {logits: values})
    experts, expected = route_reference(values, Routing(3, True))
    assert experts.tolist() == [[0, 1, 2], [1, 2, 4], [1, 3, 4]]
    assert torch.equal(experts_of(program, spread, 3), experts)
    torch.testing.assert_close(program.matrix(weights, 3), expected)


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
        step = 1 if len(rows) == 1 else 8 if len(rows) <= 16 else EVEN
        end = int(starts[expert]) + -(-len(rows) // step) * step
    assert end <= spread.room(num_rows)


def products(num_experts: int, num_inputs: int, num_outputs: int) -> list[PanelProduct]:
    return [
        panel_product(torch.randn(num_outputs, num_inputs), torch.randn(num_outputs))
        for _ in range(num_experts)
    ]


def mixed(each: list[Any], top_k: int, num_rows: int) -> None:
    """Products alone: a gate's exponential is another."""
    num_experts, writer = len(each), writer_of()
    spread, logits = writer.spread(num_experts, top_k), writer.place(num_experts)
    x, out, weights = writer.place(192), writer.place(192), writer.place(top_k)
    apart, made = writer.place(192, spread), writer.place(192, spread)
    writer.choose(logits, spread, True, weights)
    writer.gather(x, spread, apart)
    writer.products(apart, each, made, spread)
    writer.mix(made, spread, weights, out)
    program = writer.program()
    for _ in range(2):  # the second time over what the first has left
        values, scores = torch.randn(num_rows, 192), torch.randn(num_rows, num_experts)
        play(program, {x: values, logits: scores})
        experts, shares = experts_of(program, spread, num_rows), program.matrix(weights, num_rows)
        expected = mix_experts(values, experts, shares, num_experts, lambda e, rows: each[e](rows))
        assert torch.equal(program.matrix(out, num_rows), expected)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_experts", "top_k"), MIXTURES)
def test_a_mixture_has_the_launchers_bits(num_rows: int, num_experts: int, top_k: int) -> None:
    mixed(products(num_experts, 192, 192), top_k, num_rows)


@pytest.mark.skipif(not has_matrix_unit(), reason="this machine has no matrix unit")
@pytest.mark.parametrize("num_rows", ROWS)
def test_a_mixture_of_eight_bits_has_the_launchers_bits(num_rows: int) -> None:
    mixed([int8_product(torch.randn(192, 192), torch.randn(192)) for _ in range(5)], 2, num_rows)


@pytest.mark.skipif(not has_matrix_unit(), reason="this machine has no matrix unit")
def test_products_of_several_kinds_are_refused() -> None:
    writer = writer_of()
    spread, few = writer.spread(2, 1), products(1, 64, 64)
    x, y = writer.place(64, spread), writer.place(64, spread)
    with pytest.raises(Unfit, match="kinds"):
        writer.products(x, [*few, int8_product(torch.randn(64, 64), None)], y, spread)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("gated", [True, False])
def test_a_whole_layer_with_a_shared_expert(num_rows: int, gated: bool) -> None:
    writer, first, second = writer_of(), products(5, DIM, 2 * INNER), products(5, INNER, DIM)
    spread, logits, weights = writer.spread(5, 2), writer.place(5), writer.place(2)
    x, out, shared, gate = (writer.place(width) for width in (DIM, DIM, DIM, 1))
    apart, both, inner, made = (
        writer.place(width, spread) for width in (DIM, 2 * INNER, INNER, DIM)
    )
    router = torch.randn(5, DIM) / 8
    writer.score(x, router, logits)
    writer.choose(logits, spread, False, weights)
    writer.gather(x, spread, apart)
    writer.products(apart, first, both, spread)
    writer.gate(both, "silu", inner, spread)
    writer.products(inner, second, made, spread)
    writer.mix(made, spread, weights, out, shared, gate if gated else None)
    program = writer.program()
    values, others = torch.randn(num_rows, DIM), torch.randn(num_rows, DIM)
    doors = 3 * torch.randn(num_rows, 1)
    play(program, {x: values, shared: others, gate: doors})

    def run(expert: int, rows: Tensor) -> Tensor:
        return second[expert](silu_mul(first[expert](rows)))

    experts = experts_of(program, spread, num_rows)
    expected = mix_experts(values, experts, program.matrix(weights, num_rows), 5, run)
    expected += sigmoid(doors) * others if gated else others
    assert torch.equal(experts, route(values @ router.T, Routing(2))[0])
    torch.testing.assert_close(program.matrix(out, num_rows), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_harm_nobody_else(broken: float) -> None:
    writer, each = writer_of(), products(4, DIM, 64)
    spread, logits, weights = writer.spread(4, 2), writer.place(4), writer.place(2)
    x, out = writer.place(DIM), writer.place(64)
    apart, made = writer.place(DIM, spread), writer.place(64, spread)
    writer.choose(logits, spread, True, weights)
    writer.gather(x, spread, apart)
    writer.products(apart, each, made, spread)
    writer.mix(made, spread, weights, out)
    program = writer.program()
    values, scores = torch.randn(17, DIM), torch.randn(17, 4)
    play(program, {x: values, logits: scores})
    expected = program.matrix(out, 17).clone()
    values[5], scores[5] = broken, broken
    play(program, {x: values, logits: scores})
    experts, found = experts_of(program, spread, 17), program.matrix(out, 17)
    assert experts[5].tolist() == [0, 1]
    others = torch.arange(17) != 5
    torch.testing.assert_close(found[others], expected[others], rtol=1e-5, atol=1e-4)
    assert found[5].isfinite().logical_not().any()


def test_nobody_asks_for_weights_before_it_is_known_whose() -> None:
    writer, plain = writer_of(), panel_product(torch.randn(64, DIM), None)
    spread, logits, weights = writer.spread(3, 1), writer.place(3), writer.place(1)
    x, apart, made = writer.place(DIM), writer.place(DIM, spread), writer.place(64, spread)
    writer.add(x, x)
    writer.product(x, plain, x)
    writer.choose(logits, spread, True, weights)
    writer.gather(x, spread, apart)
    writer.products(apart, products(3, DIM, 64), made, spread)
    table = writer.program().table
    kinds = table[:, 0].tolist()
    known = kinds.index(SORT)
    assert table[: known + 1, NEXT].tolist() == [1, -1, -1, -1]
    assert table[known + 1, NEXT] == kinds.index(PRODUCT, known)


def test_products_that_all_tokens_need_are_asked_for_while_experts_are_chosen() -> None:
    writer, plain = writer_of(), panel_product(torch.randn(64, DIM), None)
    spread, logits, weights = writer.spread(3, 1), writer.place(3), writer.place(1)
    x = writer.place(DIM)
    writer.choose(logits, spread, True, weights)
    writer.product(x, plain, x)
    assert writer.program().table[:, NEXT].tolist() == [2, 2, -1]


def test_the_first_product_that_has_rows_is_asked_for() -> None:
    from penstock.kernels import program_loops

    loops: Any = program_loops
    writer = writer_of()
    spread, x = writer.spread(4, 1), writer.place(64)
    writer.products(x, products(4, 64, 64), x, spread)
    program = writer.program()
    program.ints[spread.rows(2).count] = 1
    assert loops._needed.py_func(program.table, program.ints, 0) == 2
    assert loops._needed.py_func(program.table, program.ints, -1) == -1
