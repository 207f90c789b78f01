"""Programs of a CPU: every operation is what its launcher computes, for any rows and threads."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.activation.op import (
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_batch_invariant,
    silu_and_mul,
    silu_and_mul_batch_invariant,
)
from penstock.kernels.attention.op import paged_attention, plan_attention
from penstock.kernels.attention.score_mod import PLAIN, ScoreMod
from penstock.kernels.kv_cache.op import rope_and_cache, slot_rows
from penstock.kernels.linear import cpu_packed_f32 as panels
from penstock.kernels.linear.cpu_packed_f32 import pack_f32
from penstock.kernels.linear.op import pack_int8
from penstock.kernels.norm.op import fused_add_rms_norm, rms_norm
from penstock.kernels.rope.op import rotary_table
from penstock.kernels.step_graph.builder import (
    MAX_GROUP,
    AttentionParams,
    Buffer,
    GraphBuilder,
    UnsupportedGraph,
)
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


def play(writer: GraphBuilder, given: dict[Buffer, Tensor], wanted: Buffer) -> Tensor:
    """What is in a place once a program was played, of so many rows as are given."""
    program, num_rows = writer.build(), len(next(iter(given.values())))
    for place, values in given.items():
        program.view(place, num_rows).copy_(values)
    slots = np.arange(num_rows)
    program.run(slots, slots * 0 + 1, NOTHING.repeat(num_rows, 0))
    return program.view(wanted, num_rows).clone()


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("dim", [16, 48, 90, 256])
def test_a_norm(num_rows: int, dim: int) -> None:
    writer = GraphBuilder(100, cache_of())
    x, out, more = (writer.alloc(dim) for _ in range(3))
    weight, values, added = torch.randn(dim), torch.randn(num_rows, dim), torch.randn(num_rows, dim)
    writer.norm(x, weight, 1e-5, out)
    assert torch.equal(play(writer, {x: values}, out), rms_norm(values, weight, 1e-5))
    writer = GraphBuilder(100, cache_of())
    x, out, more = (writer.alloc(dim) for _ in range(3))
    writer.norm(x, weight, 1e-5, out, more)
    given = {x: values, more: added}
    stream = values.clone()
    assert torch.equal(play(writer, given, out), fused_add_rms_norm(stream, added, weight, 1e-5))
    assert torch.equal(play(writer, given, x), stream)


@pytest.mark.parametrize("num_rows", ROWS)
def test_a_norm_of_some_heads(num_rows: int) -> None:
    writer = GraphBuilder(100, cache_of())
    heads, weight, values = writer.alloc(6 * 16), torch.randn(16), torch.randn(num_rows, 6, 16)
    writer.norm(heads, weight, 1e-5, heads, groups=slice(1, 4))
    expected = values.clone()
    expected[:, 1:4] = rms_norm(values[:, 1:4].contiguous(), weight, 1e-5)
    assert torch.equal(play(writer, {heads: values.flatten(1)}, heads), expected.flatten(1))


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(32, 64), (96, 192), (800, 448)])
def test_a_product_has_the_launchers_bits(num_rows: int, num_inputs: int, num_outputs: int) -> None:
    weight, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
    product = pack_f32(weight, bias)
    writer = GraphBuilder(100, cache_of())
    x, y = writer.alloc(num_inputs), writer.alloc(num_outputs)
    writer.linear(x, product, y)
    values = torch.randn(num_rows, num_inputs)
    assert torch.equal(play(writer, {x: values}, y), product(values))


@pytest.mark.skipif(not panels.has_amx(), reason="this machine has no matrix unit")
@pytest.mark.parametrize("num_rows", ROWS)
def test_products_of_eight_bits_have_the_launchers_bits(num_rows: int) -> None:
    """Two of them, which share what is made on the way."""
    first = pack_int8(torch.randn(192, 128), torch.randn(192))
    second = pack_int8(torch.randn(128, 192), None)
    writer = GraphBuilder(100, cache_of())
    x, y, z = (writer.alloc(width) for width in (128, 192, 128))
    writer.linear(x, first, y)
    writer.linear(y, second, z)
    values = torch.randn(num_rows, 128)
    assert torch.equal(play(writer, {x: values}, z), second(first(values)))


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_a_gate(num_rows: int, kind: str) -> None:
    writer = GraphBuilder(100, cache_of())
    both, out = writer.alloc(192), writer.alloc(96)
    writer.gate(both, kind, out)
    values = 5 * torch.randn(num_rows, 192)
    values[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    expected = (silu_and_mul if kind == "silu" else gelu_tanh_and_mul)(values.double())
    found = play(writer, {both: values}, out)
    torch.testing.assert_close(found, expected.float(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("inner", [32, 96, 1056])
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_a_gate_has_the_bits_of_one_that_is_computed_alike(
    num_rows: int, inner: int, kind: str
) -> None:
    writer = GraphBuilder(100, cache_of())
    both, out = writer.alloc(2 * inner), writer.alloc(inner)
    writer.gate(both, kind, out)
    values = 5 * torch.randn(num_rows, 2 * inner)
    found = play(writer, {both: values}, out)
    assert torch.equal(
        found,
        (silu_and_mul_batch_invariant if kind == "silu" else gelu_tanh_and_mul_batch_invariant)(
            values
        ),
    )
    # An element's do not depend on its place: here everything is one place further.
    moved = (silu_and_mul_batch_invariant if kind == "silu" else gelu_tanh_and_mul_batch_invariant)(
        values.roll(1, 1)
    )
    assert torch.equal(moved[:, 1:], found[:, :-1])


def test_a_gate_hides_nothing_that_is_not_finite() -> None:
    writer = GraphBuilder(1, cache_of())
    both, out = writer.alloc(64), writer.alloc(32)
    writer.gate(both, "silu", out)
    values = torch.ones(1, 64)
    values[0, 3], values[0, 5], values[0, 32 + 7] = torch.nan, torch.inf, torch.nan
    found = play(writer, {both: values}, out)
    assert found.isfinite().logical_not().nonzero()[:, 1].tolist() == [3, 5, 7]


@pytest.mark.parametrize("num_rows", ROWS)
def test_a_sum(num_rows: int) -> None:
    writer = GraphBuilder(100, cache_of())
    x, more = writer.alloc(48), writer.alloc(48)
    writer.add(x, more)
    values, added = torch.randn(num_rows, 48), torch.randn(num_rows, 48)
    assert torch.equal(play(writer, {x: values, more: added}, x), values + added)


SCORES = {
    "plain": PLAIN,
    "capped": ScoreMod(scale=0.3, cap=5.0),
    "sinks": ScoreMod(sinks=torch.randn(6)),
    "slopes": ScoreMod(slopes=torch.rand(6)),
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

    writer, layer = GraphBuilder(8, cache), cache[1].clone()
    place, out = writer.alloc(width), writer.alloc(num_heads * head_dim)
    angles = writer.alloc(2 * rotated) if rotated else None
    how = AttentionParams(
        num_heads, num_kv_heads, head_dim, angles, neighbours, window, SCORES[scores]
    )
    writer.attend(place, how, 1, out)
    program = writer.build()
    program.view(place, num_rows).copy_(heads)
    if angles is not None:
        program.view(angles, num_rows).copy_(table[last].flatten(1))
    program.run(slots, lengths, tables)

    heads = heads.view(num_rows, -1, head_dim)
    rows = slot_rows(torch.from_numpy(slots), layer.shape)
    cos_sin = table[last] if rotated else torch.zeros(num_rows, 2, 0)
    rope_and_cache(heads, num_heads, cos_sin, rows, layer, neighbours)
    starts = np.arange(num_rows + 1)
    plan = plan_attention(starts, lengths, tables, layer, window, True)
    expected = paged_attention(heads[:, :num_heads], layer, plan, SCORES[scores])
    assert torch.equal(cache[1], layer)
    assert torch.equal(program.view(out, num_rows), expected.flatten(1))


def test_a_slot_that_is_not_there_is_refused() -> None:
    cache = cache_of()
    writer, before = GraphBuilder(1, cache), cache.clone()
    place, out = writer.alloc(3 * 8), writer.alloc(8)
    writer.attend(place, AttentionParams(1, 1, 8, None, False, 0, PLAIN), 0, out)
    program = writer.build()
    for slot in (-1, NUM_BLOCKS * BLOCK_SIZE):
        with pytest.raises(IndexError, match="slots"):
            program.run(np.array([slot]), np.array([1]), NOTHING)
    assert torch.equal(cache, before)


def test_what_no_program_computes_is_refused() -> None:
    with pytest.raises(UnsupportedGraph, match="float16"):
        GraphBuilder(1, cache_of(dtype=torch.float16))
    writer = GraphBuilder(1, cache_of())
    x, y, odd = writer.alloc(32), writer.alloc(64), writer.alloc(65)
    for product, to in [
        (torch.nn.Linear(32, 64), y),
        (pack_f32(torch.randn(65, 32), None), odd),
    ]:
        with pytest.raises(UnsupportedGraph, match="product"):
            writer.linear(x, product, to)
    with pytest.raises(UnsupportedGraph, match="norm"):
        writer.norm(x, torch.ones(16), 1e-5, x)
    with pytest.raises(UnsupportedGraph, match="float64"):
        writer.norm(x, torch.ones(32, dtype=torch.float64), 1e-5, x)
    many = MAX_GROUP + 1
    heads, out = writer.alloc((many + 2) * 8), writer.alloc(many * 8)
    with pytest.raises(UnsupportedGraph, match="heads"):
        writer.attend(heads, AttentionParams(many, 1, 8, None, False, 0, PLAIN), 0, out)


@pytest.mark.skipif(not panels.has_amx(), reason="this machine has no matrix unit")
def test_rows_from_which_on_the_matrix_unit_computes_are_the_launchers() -> None:
    from penstock.kernels.step_graph import interpreter

    loops: Any = interpreter
    assert loops.MIN_AMX_ROWS == panels.MIN_AMX_ROWS
    assert loops.HAS_AMX
