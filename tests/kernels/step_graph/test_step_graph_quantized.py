"""Products with quantized weights have the same bits in a CPU step graph as outside of it."""

from typing import get_args

import pytest
import torch

from penstock.kernels.cpu_common.cpu_features import has_avx2
from penstock.kernels.linear.cpu_packed_int4 import PackedLinearInt4, has_int4_loops
from penstock.kernels.linear.quantized import DequantizingLinear, Kind, pack_quantized
from penstock.kernels.step_graph.builder import GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.opcodes import (
    MATMUL_INT4,
    MATMUL_QUANTIZED,
    OPCODE,
    QUANTIZE_BLOCKS,
)
from tests.kernels.linear.test_quantized import matrix
from tests.kernels.step_graph.test_step_graph import make_cache, run_graph
from tests.kernels.step_graph.test_step_graph_moe import check_experts
from tests.support.threads import threads

pytestmark = pytest.mark.skipif(not has_avx2(), reason="needs AVX2")
needs_vnni = pytest.mark.skipif(not has_int4_loops(), reason="needs AVX2 or AVX-512 VNNI")
ROWS = (1, 2, 8, 9, 65)
KINDS: tuple[Kind, ...] = get_args(Kind)


def packed(kind: Kind, outputs: int, inputs: int, act_order: bool = False) -> DequantizingLinear:
    weights = matrix(kind, outputs, inputs, 32, act_order)
    found = pack_quantized(weights, torch.randn(outputs), torch.float32)
    assert isinstance(found, DequantizingLinear)
    return found


def packed_int4(outputs: int, inputs: int, group: int = 32) -> PackedLinearInt4:
    weights = matrix("int4", outputs, inputs, group, False)
    found = pack_quantized(weights, torch.randn(outputs), torch.float32, int8_activations=True)
    assert isinstance(found, PackedLinearInt4)
    return found


def check_product(
    product: DequantizingLinear | PackedLinearInt4, sizes: tuple[int, int], opcodes: list[int]
) -> None:
    for num_threads in (1, 3):
        for num_rows in ROWS:
            builder = GraphBuilder(100, make_cache())
            x, y = builder.alloc(sizes[1]), builder.alloc(sizes[0])
            builder.linear(x, product, y)
            values = torch.randn(num_rows, sizes[1])
            with threads(num_threads):
                found = run_graph(builder, {x: values}, y)
                assert torch.equal(found, product(values))
            assert builder.build().table[:, OPCODE].tolist() == opcodes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("sizes", [(64, 32), (192, 416)])
def test_product_has_the_bits_of_the_op(
    kind: Kind, act_order: bool, sizes: tuple[int, int]
) -> None:
    """A panel ends after every 48 outputs: 64 outputs end inside a panel, 192 fill four panels."""
    check_product(packed(kind, *sizes, act_order), sizes, [MATMUL_QUANTIZED])


@needs_vnni
@pytest.mark.parametrize("group", [32, 416])
@pytest.mark.parametrize("sizes", [(64, 416), (192, 416)])
def test_product_of_integers_has_the_bits_of_the_op(sizes: tuple[int, int], group: int) -> None:
    check_product(packed_int4(*sizes, group=group), sizes, [QUANTIZE_BLOCKS, MATMUL_INT4])


def test_experts_have_the_bits_of_moe_forward() -> None:
    for num_rows in ROWS:
        check_experts([packed("int4", 192, 192) for _ in range(5)], 2, num_rows)


@needs_vnni
def test_experts_of_integers_have_the_bits_of_moe_forward() -> None:
    for num_rows in ROWS:
        check_experts([packed_int4(192, 192) for _ in range(5)], 2, num_rows)


@needs_vnni
def test_experts_with_groups_of_several_sizes_are_refused() -> None:
    builder = GraphBuilder(1, make_cache())
    layout = builder.expert_layout(2, 1)
    x, y = builder.alloc(128, layout), builder.alloc(64, layout)
    experts = [packed_int4(64, 128, size) for size in (32, 64)]
    with pytest.raises(UnsupportedGraph, match="group sizes"):
        builder.expert_linears(x, experts, y, layout)


def test_unaligned_outputs_are_refused() -> None:
    builder = GraphBuilder(1, make_cache())
    x, y = builder.alloc(32), builder.alloc(65)
    with pytest.raises(UnsupportedGraph, match="linear layer of type"):
        builder.linear(x, packed("fp8", 65, 32), y)
