"""Programs of a CPU: every operation is what its launcher computes, for any rows and threads."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels import panel_product as panels
from penstock.kernels.activation import gelu_mul, gelu_mul_alike, silu_mul, silu_mul_alike
from penstock.kernels.attention import paged_attention, plan_attention
from penstock.kernels.cache import rotate_and_write, write_rows
from penstock.kernels.norm import add_rms_norm, rms_norm
from penstock.kernels.panel_product import panel_product
from penstock.kernels.products import int8_product
from penstock.kernels.program import MOST_GROUP, Heads, Place, Unfit, Writer
from penstock.kernels.rotary import rotary_table
from penstock.kernels.scores import PLAIN, Scores
from tests.support.threads import threads

ROWS = (1, 2, 7, 8, 9, 12, 17, 64, 65, 100)
BLOCK_SIZE, NUM_BLOCKS = 4, 64
NOTHING = np.zeros((1, 1), np.int32)


@pytest.fixture(params=[1, 2, 3], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with threads(request.param):
        yield request.param


def cache_of(num_kv_heads: int = 1, head_dim: int = 8, dtype: Any = torch.float32) -> Tensor:
    shape = (2, 2, NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, head_dim)
    return torch.randn(shape).to(dtype)


def play(writer: Writer, given: dict[Place, Tensor], wanted: Place) -> Tensor:
    """What is in a place once a program was played, of so many rows as are given."""
    program, num_rows = writer.program(), len(next(iter(given.values())))
    for place, values in given.items():
        program.matrix(place, num_rows).copy_(values)
    slots = np.arange(num_rows)
    program.play(slots, slots * 0 + 1, NOTHING.repeat(num_rows, 0))
    return program.matrix(wanted, num_rows).clone()


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("dim", [16, 48, 90, 256])
def test_a_norm(num_rows: int, dim: int) -> None:
    writer = Writer(100, cache_of())
    x, out, more = (writer.place(dim) for _ in range(3))
    weight, values, added = torch.randn(dim), torch.randn(num_rows, dim), torch.randn(num_rows, dim)
    writer.norm(x, weight, 1e-5, out)
    assert torch.equal(play(writer, {x: values}, out), rms_norm(values, weight, 1e-5))
    writer = Writer(100, cache_of())
    x, out, more = (writer.place(dim) for _ in range(3))
    writer.norm(x, weight, 1e-5, out, more)
    given = {x: values, more: added}
    stream = values.clone()
    assert torch.equal(play(writer, given, out), add_rms_norm(stream, added, weight, 1e-5))
    assert torch.equal(play(writer, given, x), stream)


@pytest.mark.parametrize("num_rows", ROWS)
def test_a_norm_of_some_heads(num_rows: int) -> None:
    writer = Writer(100, cache_of())
    heads, weight, values = writer.place(6 * 16), torch.randn(16), torch.randn(num_rows, 6, 16)
    writer.norm(heads, weight, 1e-5, heads, groups=slice(1, 4))
    expected = values.clone()
    expected[:, 1:4] = rms_norm(values[:, 1:4].contiguous(), weight, 1e-5)
    assert torch.equal(play(writer, {heads: values.flatten(1)}, heads), expected.flatten(1))


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(32, 64), (96, 192), (800, 448)])
def test_a_product_has_the_launchers_bits(num_rows: int, num_inputs: int, num_outputs: int) -> None:
    weight, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
    product = panel_product(weight, bias)
    writer = Writer(100, cache_of())
    x, y = writer.place(num_inputs), writer.place(num_outputs)
    writer.product(x, product, y)
    values = torch.randn(num_rows, num_inputs)
    assert torch.equal(play(writer, {x: values}, y), product(values))


@pytest.mark.skipif(not panels.has_matrix_unit(), reason="this machine has no matrix unit")
@pytest.mark.parametrize("num_rows", ROWS)
def test_products_of_eight_bits_have_the_launchers_bits(num_rows: int) -> None:
    """Two of them, which share what is made on the way."""
    first = int8_product(torch.randn(192, 128), torch.randn(192))
    second = int8_product(torch.randn(128, 192), None)
    writer = Writer(100, cache_of())
    x, y, z = (writer.place(width) for width in (128, 192, 128))
    writer.product(x, first, y)
    writer.product(y, second, z)
    values = torch.randn(num_rows, 128)
    assert torch.equal(play(writer, {x: values}, z), second(first(values)))


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_a_gate(num_rows: int, kind: str) -> None:
    writer = Writer(100, cache_of())
    both, out = writer.place(192), writer.place(96)
    writer.gate(both, kind, out)
    values = 5 * torch.randn(num_rows, 192)
    values[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    expected = (silu_mul if kind == "silu" else gelu_mul)(values.double())
    found = play(writer, {both: values}, out)
    torch.testing.assert_close(found, expected.float(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("inner", [32, 96, 1056])
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_a_gate_has_the_bits_of_one_that_is_computed_alike(
    num_rows: int, inner: int, kind: str
) -> None:
    writer = Writer(100, cache_of())
    both, out = writer.place(2 * inner), writer.place(inner)
    writer.gate(both, kind, out)
    values = 5 * torch.randn(num_rows, 2 * inner)
    found = play(writer, {both: values}, out)
    assert torch.equal(found, (silu_mul_alike if kind == "silu" else gelu_mul_alike)(values))
    # An element's do not depend on its place: here everything is one place further.
    moved = (silu_mul_alike if kind == "silu" else gelu_mul_alike)(values.roll(1, 1))
    assert torch.equal(moved[:, 1:], found[:, :-1])


def test_a_gate_hides_nothing_that_is_not_finite() -> None:
    writer = Writer(1, cache_of())
    both, out = writer.place(64), writer.place(32)
    writer.gate(both, "silu", out)
    values = torch.ones(1, 64)
    values[0, 3], values[0, 5], values[0, 32 + 7] = torch.nan, torch.inf, torch.nan
    found = play(writer, {both: values}, out)
    assert found.isfinite().logical_not().nonzero()[:, 1].tolist() == [3, 5, 7]


@pytest.mark.parametrize("num_rows", ROWS)
def test_a_sum(num_rows: int) -> None:
    writer = Writer(100, cache_of())
    x, more = writer.place(48), writer.place(48)
    writer.add(x, more)
    values, added = torch.randn(num_rows, 48), torch.randn(num_rows, 48)
    assert torch.equal(play(writer, {x: values, more: added}, x), values + added)


SCORES = {
    "plain": PLAIN,
    "capped": Scores(scale=0.3, cap=5.0),
    "sinks": Scores(sinks=torch.randn(6)),
    "slopes": Scores(slopes=torch.rand(6)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["wide", "narrow"])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "rotated", "neighbours", "window"),
    [(2, 32, 32, False, 0), (1, 24, 8, True, 7), (6, 16, 0, False, 5)],
)
def test_attention_has_the_launchers_bits(
    num_kv_heads: int,
    head_dim: int,
    rotated: int,
    neighbours: bool,
    window: int,
    scores: str,
    dtype: torch.dtype,
) -> None:
    num_rows, num_heads = 5, 6
    cache = cache_of(num_kv_heads, head_dim, dtype)
    generator = np.random.default_rng(0)
    lengths = np.array([1, 4, 9, 30, 17])
    tables = generator.permutation(NUM_BLOCKS)[: num_rows * 8].reshape(num_rows, 8).astype(np.int32)
    last = lengths - 1
    slots = tables[np.arange(num_rows), last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE
    width = (num_heads + 2 * num_kv_heads) * head_dim
    heads = torch.randn(num_rows, width)
    table = rotary_table(torch.rand(rotated // 2), 32, torch.float32, 1.0, neighbours)

    writer, layer = Writer(8, cache), cache[1].clone()
    place, out = writer.place(width), writer.place(num_heads * head_dim)
    angles = writer.place(2 * rotated) if rotated else None
    how = Heads(num_heads, num_kv_heads, head_dim, angles, neighbours, window, SCORES[scores])
    writer.attend(place, how, 1, out)
    program = writer.program()
    program.matrix(place, num_rows).copy_(heads)
    if angles is not None:
        program.matrix(angles, num_rows).copy_(table[last].flatten(1))
    program.play(slots, lengths, tables)

    heads = heads.view(num_rows, -1, head_dim)
    rows = write_rows(torch.from_numpy(slots), layer.shape)
    cos_sin = table[last] if rotated else torch.zeros(num_rows, 2, 0)
    rotate_and_write(heads, num_heads, cos_sin, rows, layer, neighbours)
    starts = np.arange(num_rows + 1)
    plan = plan_attention(starts, lengths, tables, layer, window, True)
    expected = paged_attention(heads[:, :num_heads], layer, plan, SCORES[scores])
    assert torch.equal(cache[1], layer)
    assert torch.equal(program.matrix(out, num_rows), expected.flatten(1))


def test_a_slot_that_is_not_there_is_refused() -> None:
    cache = cache_of()
    writer, before = Writer(1, cache), cache.clone()
    place, out = writer.place(3 * 8), writer.place(8)
    writer.attend(place, Heads(1, 1, 8, None, False, 0, PLAIN), 0, out)
    program = writer.program()
    for slot in (-1, NUM_BLOCKS * BLOCK_SIZE):
        with pytest.raises(IndexError, match="slots"):
            program.play(np.array([slot]), np.array([1]), NOTHING)
    assert torch.equal(cache, before)


def test_what_no_program_computes_is_refused() -> None:
    with pytest.raises(Unfit, match="float16"):
        Writer(1, cache_of(dtype=torch.float16))
    writer = Writer(1, cache_of())
    x, y, odd = writer.place(32), writer.place(64), writer.place(65)
    for product, to in [
        (torch.nn.Linear(32, 64), y),
        (panel_product(torch.randn(65, 32), None), odd),
    ]:
        with pytest.raises(Unfit, match="product"):
            writer.product(x, product, to)
    with pytest.raises(Unfit, match="norm"):
        writer.norm(x, torch.ones(16), 1e-5, x)
    with pytest.raises(Unfit, match="float64"):
        writer.norm(x, torch.ones(32, dtype=torch.float64), 1e-5, x)
    many = MOST_GROUP + 1
    heads, out = writer.place((many + 2) * 8), writer.place(many * 8)
    with pytest.raises(Unfit, match="heads"):
        writer.attend(heads, Heads(many, 1, 8, None, False, 0, PLAIN), 0, out)


@pytest.mark.skipif(not panels.has_matrix_unit(), reason="this machine has no matrix unit")
def test_rows_from_which_on_the_matrix_unit_computes_are_the_launchers() -> None:
    from penstock.kernels import program_loops

    loops: Any = program_loops
    assert loops.SPLIT_ROWS == panels.SPLIT_ROWS
    assert loops.HAS_TILES
