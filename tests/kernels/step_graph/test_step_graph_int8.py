"""INT8 products in CPU step graphs, with plain loops in place of AMX, so that any CPU runs them."""

from typing import Any

import pytest
import torch

from penstock.kernels.linear.cpu_packed_int8 import pack_int8_tiles
from penstock.kernels.linear.quantize_rows import ZERO_POINT, quantize_per_token
from penstock.kernels.step_graph.builder import GraphBuilder
from penstock.kernels.step_graph.opcodes import LIMIT, MATMUL_INT8, OPCODE, QUANTIZE


def plain_columns(
    qvalues: Any, num_rows: int, num_inputs: int, weights: Any, correction: Any, row_scales: Any,
    scales: Any, bias: Any, y: Any, width: int, first: int, last: int,
) -> None:  # fmt: skip
    """Reference for `cpu_int8_amx.compute_columns`: blocks [first, last) of 64 columns."""
    for row in range(num_rows):
        for column in range(64 * first, 64 * last):
            total, tile, within = correction[column], column // 16, column % 16
            for k in range(num_inputs):
                at = tile * num_inputs * 16 + k // 4 * 64 + within * 4 + k % 4
                weight = int(weights[at])
                total += int(qvalues[row * num_inputs + k]) * (weight - weight // 128 * 256)
            y[row * width + column] = total * scales[column] * row_scales[row] + bias[column]


@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_int8_linear_equals_the_product_of_quantized_values(
    limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.kernels.step_graph import matmuls

    loops: Any = matmuls
    monkeypatch.setattr(matmuls, "HAS_INT8_LOOPS", True)
    numba = pytest.importorskip("numba")
    monkeypatch.setattr(matmuls, "_int8_columns", numba.njit(plain_columns))
    execute: Any = {
        code: numba.njit(function.py_func)
        for code, function in [
            (QUANTIZE, loops.quantize),
            (MATMUL_INT8, loops.int8_linear),
        ]
    }
    qweight = torch.randint(-127, 128, (192, 128), dtype=torch.int8)
    scales, bias = torch.rand(192), torch.randn(192)
    builder = GraphBuilder(8, torch.zeros(1, 2, 8, 1, 1, 8))
    x, y = builder.alloc(128), builder.alloc(192)
    builder.linear(x, pack_int8_tiles(qweight, scales, bias, limit), y)
    graph, values = builder.build(), torch.randn(8, 128)
    graph.view(x, 8).copy_(values)
    assert graph.table[:, OPCODE].tolist() == [QUANTIZE, MATMUL_INT8]
    for first, num_rows in ((0, 5), (5, 3)):  # two ranges of rows, like those of two experts
        for op, floats in zip(graph.table, graph.floats, strict=True):
            given = (floats[LIMIT],) if op[OPCODE] == QUANTIZE else ()
            for thread in range(2):
                execute[op[OPCODE]](op, *given, graph.arena.numpy(), first, num_rows, thread, 2)
    qvalues, row_scales = quantize_per_token(values, limit)
    sums = (qvalues.double() - ZERO_POINT) @ qweight.double().T
    expected = sums * scales * row_scales.view(-1, 1) + bias
    torch.testing.assert_close(graph.view(y, 8), expected.float(), rtol=1e-5, atol=1e-4)
