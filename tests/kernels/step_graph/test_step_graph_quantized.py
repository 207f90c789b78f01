"""Products with quantized weights have the same bits in a CPU step graph as outside of it."""

from typing import get_args

import pytest
import torch

from penstock.kernels.linear.cpu_packed_f32 import has_avx512
from penstock.kernels.linear.quantized import DequantizingLinear, Kind, pack_quantized
from penstock.kernels.step_graph.builder import GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.opcodes import MATMUL_QUANTIZED, OPCODE
from tests.kernels.linear.test_quantized import matrix
from tests.kernels.step_graph.test_step_graph import make_cache, run_graph
from tests.kernels.step_graph.test_step_graph_moe import check_experts
from tests.support.threads import threads

pytestmark = pytest.mark.skipif(not has_avx512(), reason="needs AVX-512")
ROWS = (1, 2, 8, 9, 65)
KINDS: tuple[Kind, ...] = get_args(Kind)


def packed(kind: Kind, outputs: int, inputs: int, act_order: bool = False) -> DequantizingLinear:
    weights = matrix(kind, outputs, inputs, 32, act_order)
    found = pack_quantized(weights, torch.randn(outputs), torch.float32)
    assert isinstance(found, DequantizingLinear)
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("sizes", [(64, 32), (192, 416)])
def test_product_has_the_bits_of_the_op(
    kind: Kind, act_order: bool, sizes: tuple[int, int]
) -> None:
    """A panel ends after every 48 outputs: 64 outputs end inside a panel, 192 fill four panels."""
    product = packed(kind, *sizes, act_order)
    for num_threads in (1, 3):
        for num_rows in ROWS:
            builder = GraphBuilder(100, make_cache())
            x, y = builder.alloc(sizes[1]), builder.alloc(sizes[0])
            builder.linear(x, product, y)
            values = torch.randn(num_rows, sizes[1])
            with threads(num_threads):
                found = run_graph(builder, {x: values}, y)
                assert torch.equal(found, product(values))
            assert builder.build().table[:, OPCODE].tolist() == [MATMUL_QUANTIZED]


def test_experts_have_the_bits_of_moe_forward() -> None:
    for num_rows in ROWS:
        check_experts([packed("int4", 192, 192) for _ in range(5)], 2, num_rows)


def test_unaligned_outputs_are_refused() -> None:
    builder = GraphBuilder(1, make_cache())
    x, y = builder.alloc(32), builder.alloc(65)
    with pytest.raises(UnsupportedGraph, match="product"):
        builder.linear(x, packed("fp8", 65, 32), y)
