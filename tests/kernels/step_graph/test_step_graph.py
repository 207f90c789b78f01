"""CPU step graphs: operations equal the ops that they replace, for any row and thread counts."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.kernels.activation.op import (
    gelu_tanh_and_mul,
    silu_and_mul,
    silu_and_mul_batch_invariant,
)
from penstock.kernels.attention.op import paged_attention, plan_attention
from penstock.kernels.attention.score_mod import PLAIN, ScoreMod
from penstock.kernels.kv_cache.op import rope_and_cache, slot_rows
from penstock.kernels.linear import cpu_packed_f32 as panels
from penstock.kernels.linear.cpu_packed_f32 import pack_f32
from penstock.kernels.linear.cpu_packed_int8 import has_int8_loops
from penstock.kernels.linear.op import pack_int8
from penstock.kernels.norm.op import fused_add_rms_norm, rms_norm
from penstock.kernels.rope.op import rotary_table
from penstock.kernels.step_graph.builder import (
    MAX_GROUP,
    AttentionParams,
    GraphBuilder,
    UnsupportedGraph,
)
from penstock.kernels.step_graph.layout import Buffer
from penstock.kernels.step_graph.opcodes import ADD, NORM, OPCODE
from penstock.kernels.step_graph.operations import Norm
from tests.support.threads import threads

ROWS = (1, 2, 7, 8, 9, 12, 17, 64, 65, 100)
BLOCK_SIZE, NUM_BLOCKS = 4, 64
NO_BLOCKS = np.zeros((1, 1), np.int32)


@pytest.fixture(params=[1, 2, 3], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    with threads(request.param):
        yield request.param


def make_cache(
    num_kv_heads: int = 1,
    head_dim: int = 8,
    dtype: Any = torch.float32,
    block_size: int = BLOCK_SIZE,
) -> Tensor:
    shape = (2, 2, NUM_BLOCKS, num_kv_heads, block_size, head_dim)
    return torch.randn(shape).to(dtype)


def run_graph(builder: GraphBuilder, inputs: dict[Buffer, Tensor], output: Buffer) -> Tensor:
    """Build and run the graph on `inputs`; return the contents of the `output` buffer."""
    graph, num_rows = builder.build(), len(next(iter(inputs.values())))
    for buffer, values in inputs.items():
        graph.view(buffer, num_rows).copy_(values)
    slots = np.arange(num_rows)
    graph.run(slots, slots * 0 + 1, NO_BLOCKS.repeat(num_rows, 0))
    return graph.view(output, num_rows).clone()


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("dim", [16, 48, 90, 256])
def test_rms_norm_has_the_bits_of_the_op(num_rows: int, dim: int) -> None:
    builder = GraphBuilder(100, make_cache())
    x, out, addend = (builder.alloc(dim) for _ in range(3))
    weight, values, added = torch.randn(dim), torch.randn(num_rows, dim), torch.randn(num_rows, dim)
    builder.norm(x, weight, 1e-5, out)
    assert torch.equal(run_graph(builder, {x: values}, out), rms_norm(values, weight, 1e-5))
    builder = GraphBuilder(100, make_cache())
    x, out, addend = (builder.alloc(dim) for _ in range(3))
    builder.add(x, addend)
    builder.norm(x, weight, 1e-5, out)
    inputs = {x: values, addend: added}
    stream = values.clone()
    assert torch.equal(
        run_graph(builder, inputs, out), fused_add_rms_norm(stream, added, weight, 1e-5)
    )
    assert torch.equal(run_graph(builder, inputs, x), stream)


def test_add_is_merged_only_with_a_whole_norm_of_the_same_buffer() -> None:
    builder = GraphBuilder(100, make_cache())
    x, y, addend = (builder.alloc(32) for _ in range(3))
    builder.add(x, addend)
    builder.norm(x, torch.ones(32), 1e-5, y)
    builder.add(x, addend)
    builder.norm(y, torch.ones(32), 1e-5, y)
    builder.add(x, addend)
    builder.norm(x, torch.ones(16), 1e-5, x, range(32))
    builder.add(x, addend)
    assert builder.build().table[:, OPCODE].tolist() == [NORM, ADD, NORM, ADD, NORM, ADD]


def test_norm_of_several_groups_cannot_be_combined_with_an_addition() -> None:
    x = Buffer(0, 32)
    Norm(x, torch.ones(32), 1e-5, x, 0, 32, added=x)
    with pytest.raises(ValueError, match="several groups"):
        Norm(x, torch.ones(16), 1e-5, x, 0, 32, added=x)


@pytest.mark.parametrize("num_rows", ROWS)
def test_norm_of_selected_heads(num_rows: int) -> None:
    builder = GraphBuilder(100, make_cache())
    heads, weight, values = builder.alloc(6 * 16), torch.randn(16), torch.randn(num_rows, 6, 16)
    builder.norm(heads, weight, 1e-5, heads, range(16, 64))
    expected = values.clone()
    expected[:, 1:4] = rms_norm(values[:, 1:4].contiguous(), weight, 1e-5)
    assert torch.equal(run_graph(builder, {heads: values.flatten(1)}, heads), expected.flatten(1))


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(32, 64), (96, 192), (800, 448)])
def test_linear_has_the_bits_of_the_op(num_rows: int, num_inputs: int, num_outputs: int) -> None:
    weight, bias = torch.randn(num_outputs, num_inputs), torch.randn(num_outputs)
    product = pack_f32(weight, bias)
    builder = GraphBuilder(100, make_cache())
    x, y = builder.alloc(num_inputs), builder.alloc(num_outputs)
    builder.linear(x, product, y)
    values = torch.randn(num_rows, num_inputs)
    assert torch.equal(run_graph(builder, {x: values}, y), product(values))


@pytest.mark.skipif(not has_int8_loops(), reason="needs AVX2 or VNNI")
@pytest.mark.parametrize("num_rows", ROWS)
def test_int8_linears_have_the_bits_of_the_op(num_rows: int) -> None:
    """Both layers of the graph use the same scratch buffers for quantized rows."""
    first = pack_int8(torch.randn(192, 128), torch.randn(192))
    second = pack_int8(torch.randn(128, 192), None)
    builder = GraphBuilder(100, make_cache())
    x, y, z = (builder.alloc(width) for width in (128, 192, 128))
    builder.linear(x, first, y)
    builder.linear(y, second, z)
    values = torch.randn(num_rows, 128)
    assert torch.equal(run_graph(builder, {x: values}, z), second(first(values)))


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_gate(num_rows: int, kind: str) -> None:
    builder = GraphBuilder(100, make_cache())
    both, out = builder.alloc(192), builder.alloc(96)
    builder.gate(both, kind, out)
    values = 5 * torch.randn(num_rows, 192)
    values[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -0.0])
    expected = (silu_and_mul if kind == "silu" else gelu_tanh_and_mul)(values.double())
    found = run_graph(builder, {both: values}, out)
    torch.testing.assert_close(found, expected.float(), rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("inner", [32, 96, 1056])
@pytest.mark.parametrize("kind", ["silu", "gelu"])
def test_gate_has_the_bits_of_the_batch_invariant_op(num_rows: int, inner: int, kind: str) -> None:
    builder = GraphBuilder(100, make_cache())
    both, out = builder.alloc(2 * inner), builder.alloc(inner)
    builder.gate(both, kind, out)
    values = 5 * torch.randn(num_rows, 2 * inner)
    found = run_graph(builder, {both: values}, out)
    assert torch.equal(
        found,
        (silu_and_mul_batch_invariant if kind == "silu" else gelu_tanh_and_mul)(values),
    )
    # Shift all elements by one index. The bits of a result must not depend on its index.
    rolled = (silu_and_mul_batch_invariant if kind == "silu" else gelu_tanh_and_mul)(
        values.roll(1, 1)
    )
    assert torch.equal(rolled[:, 1:], found[:, :-1])


def test_gate_propagates_nan_and_inf() -> None:
    builder = GraphBuilder(1, make_cache())
    both, out = builder.alloc(64), builder.alloc(32)
    builder.gate(both, "silu", out)
    values = torch.ones(1, 64)
    values[0, 3], values[0, 5], values[0, 32 + 7] = torch.nan, torch.inf, torch.nan
    found = run_graph(builder, {both: values}, out)
    assert found.isfinite().logical_not().nonzero()[:, 1].tolist() == [3, 5, 7]


@pytest.mark.parametrize("num_rows", ROWS)
def test_add(num_rows: int) -> None:
    builder = GraphBuilder(100, make_cache())
    x, addend = builder.alloc(48), builder.alloc(48)
    builder.add(x, addend)
    values, added = torch.randn(num_rows, 48), torch.randn(num_rows, 48)
    assert torch.equal(run_graph(builder, {x: values, addend: added}, x), values + added)


SCORES = {
    "plain": PLAIN,
    "capped": ScoreMod(scale=0.3, cap=5.0),
    "sinks": ScoreMod(sinks=torch.randn(6)),
    "slopes": ScoreMod(slopes=torch.rand(6)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["wide", "narrow"])
@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize(
    ("block_size", "num_kv_heads", "head_dim", "rotary_dim", "interleaved", "window"),
    [
        *((4, 2, 32, 32, False, 0), (4, 1, 24, 8, True, 7), (4, 6, 16, 0, False, 5)),
        *((16, 2, 64, 64, False, 0), (32, 1, 128, 8, True, 70), (64, 6, 64, 0, False, 0)),
    ],
)
def test_attention_has_the_bits_of_the_op(
    block_size: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    interleaved: bool,
    window: int,
    scores: str,
    dtype: torch.dtype,
) -> None:
    num_rows, num_heads = 5, 6
    cache = make_cache(num_kv_heads, head_dim, dtype, block_size)
    generator = np.random.default_rng(0)
    lengths = np.array([1, 4, 9, 8 * block_size - 2, 17])
    tables = generator.permutation(NUM_BLOCKS)[: num_rows * 8].reshape(num_rows, 8).astype(np.int32)
    last = lengths - 1
    slots = tables[np.arange(num_rows), last // block_size] * block_size + last % block_size
    width = (num_heads + 2 * num_kv_heads) * head_dim
    heads = torch.randn(num_rows, width)
    table = rotary_table(
        torch.rand(rotary_dim // 2), 8 * block_size, torch.float32, 1.0, interleaved
    )

    builder, layer = GraphBuilder(8, cache), cache[1].clone()
    buffer, out = builder.alloc(width), builder.alloc(num_heads * head_dim)
    angles = builder.alloc(2 * rotary_dim) if rotary_dim else None
    params = AttentionParams(
        num_heads, num_kv_heads, head_dim, angles, interleaved, window, SCORES[scores]
    )
    builder.attend(buffer, params, 1, out)
    graph = builder.build()
    graph.view(buffer, num_rows).copy_(heads)
    if angles is not None:
        graph.view(angles, num_rows).copy_(table[last].flatten(1))
    graph.run(slots, lengths, tables)

    heads = heads.view(num_rows, -1, head_dim)
    rows = slot_rows(torch.from_numpy(slots), layer.shape)
    cos_sin = table[last] if rotary_dim else torch.zeros(num_rows, 2, 0)
    rope_and_cache(heads, num_heads, cos_sin, rows, layer, interleaved)
    starts = np.arange(num_rows + 1)
    plan = plan_attention(starts, lengths, tables, layer, window, True)
    expected = paged_attention(heads[:, :num_heads], layer, plan, SCORES[scores])
    assert torch.equal(cache[1], layer)
    assert torch.equal(graph.view(out, num_rows), expected.flatten(1))


def test_slots_outside_the_cache_are_refused() -> None:
    cache = make_cache()
    builder, before = GraphBuilder(1, cache), cache.clone()
    buffer, out = builder.alloc(3 * 8), builder.alloc(8)
    builder.attend(buffer, AttentionParams(1, 1, 8, None, False, 0, PLAIN), 0, out)
    graph = builder.build()
    for slot in (-1, NUM_BLOCKS * BLOCK_SIZE):
        with pytest.raises(IndexError, match="slots"):
            graph.run(np.array([slot]), np.array([1]), NO_BLOCKS)
    assert torch.equal(cache, before)


def test_unsupported_operations_are_refused() -> None:
    with pytest.raises(UnsupportedGraph, match="float16"):
        GraphBuilder(1, make_cache(dtype=torch.float16))
    builder = GraphBuilder(1, make_cache())
    x, y, unaligned = builder.alloc(32), builder.alloc(64), builder.alloc(65)
    for product, out in [
        (torch.nn.Linear(32, 64), y),
        (pack_f32(torch.randn(65, 32), None), unaligned),
    ]:
        with pytest.raises(UnsupportedGraph, match="linear layer of type"):
            builder.linear(x, product, out)
    with pytest.raises(UnsupportedGraph, match="norm"):
        builder.norm(x, torch.ones(16), 1e-5, x)
    for columns in (range(8, 40), range(24)):
        with pytest.raises(UnsupportedGraph, match="norm"):
            builder.norm(x, torch.ones(16), 1e-5, x, columns)
    with pytest.raises(UnsupportedGraph, match="float64"):
        builder.norm(x, torch.ones(32, dtype=torch.float64), 1e-5, x)
    many = MAX_GROUP + 1
    heads, out = builder.alloc((many + 2) * 8), builder.alloc(many * 8)
    with pytest.raises(UnsupportedGraph, match="heads"):
        builder.attend(heads, AttentionParams(many, 1, 8, None, False, 0, PLAIN), 0, out)


@pytest.mark.skipif(not panels.has_amx(), reason="needs AMX")
def test_interpreter_uses_amx_from_the_same_row_count_as_the_op() -> None:
    from penstock.kernels.step_graph import matmuls

    loops: Any = matmuls
    assert loops.MIN_AMX_ROWS == panels.MIN_AMX_ROWS
    assert loops.HAS_AMX
