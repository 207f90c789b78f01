"""Tests of feed-forward layers."""

from collections.abc import Callable

import pytest
import torch

from penstock.kernels.activation.op import gelu_tanh_and_mul, silu_and_mul
from penstock.kernels.linear.op import pack_int8
from penstock.workers.layers.linear import Linear
from penstock.workers.layers.mlp import Mlp
from tests.support.threads import threads


def int8_linear(num_inputs: int, num_outputs: int) -> Linear:
    weight = torch.randn(num_outputs, num_inputs)
    return Linear(weight, None, (num_outputs,), pack_int8(weight, None))


@pytest.mark.parametrize("activation", [silu_and_mul, gelu_tanh_and_mul])
def test_bits_are_the_same_for_many_rows_and_few(
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """For many rows, the product with INT8 weights may also compute the activation."""
    mlp = Mlp(int8_linear(64, 256), int8_linear(128, 64), activation)
    x = torch.randn(300, 64)
    with threads(2):
        few = [mlp(rows) for rows in torch.split(x, 100)]
        assert torch.equal(mlp(x), torch.cat(few))
