"""Batch-invariant matrix product y = x Wᵀ + b: a row of y does not depend on the other rows.

Vendor libraries choose the tile sizes, and with them the order of summation, by the number of rows.
Therefore the last bits of a result depend on the batch. Here the order of summation does not depend
on the number of rows: the K inputs are divided into slices (split-K), each slice is accumulated in
float32 from its first input to its last, and the slices are added in order. With few rows, each
slice has its own program, and a second kernel adds the slices. With many rows, one program computes
all slices in turn. Both methods give bitwise identical results.

x [T, K], weight [N, K], bias [N] and y [T, N] have one dtype: float32 (multiplied as float32, never
TF32), float16 or bfloat16. `batch_invariant_bmm` computes one such product per head in one launch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.checks import FLOATS, check
from penstock.kernels.linear.triton_batch_invariant import batch_invariant_bmm_triton
from penstock.kernels.triton_common.launch import use_triton


def batch_invariant_matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return y = x Wᵀ + b [T, N]; row t of y depends only on row t of x, on W and on b.

    Args:
        x: [T, K] with contiguous rows, on a GPU.
        weight: [N, K] with contiguous rows or contiguous columns; dtype and device of x.
        bias: [N] or None; dtype and device of x.

    Raises:
        ValueError: if a shape, dtype or stride is wrong, or if x is on a CPU.
    """
    _check(x[:, None], weight[None], bias)
    return batch_invariant_bmm_triton(x[:, None], weight[None], bias)[:, 0]


def batch_invariant_bmm(x: Tensor, weight: Tensor) -> Tensor:
    """Return x[:, h] weight[h]ᵀ for each head h: [T, H, N], from x [T, H, K], weight [H, N, K]."""
    _check(x, weight, None)
    return batch_invariant_bmm_triton(x, weight, None)


@dataclass(frozen=True, slots=True)
class BatchInvariantLinear:
    """A linear layer computed by `batch_invariant_matmul`."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, K] to [T, N]."""
        return batch_invariant_matmul(x, self.weight, self.bias)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if not use_triton(x):
        raise ValueError(f"x is on {x.device}: expected a GPU")
    check("x", x, ("T", "H", "K"), FLOATS)
    _, num_heads, num_inputs = x.shape
    outputs_first = weight.dim() == 3 and weight.stride(1) == 1 != weight.stride(2)
    stored = weight.transpose(1, 2) if outputs_first else weight
    inner: tuple[int | str, ...] = (num_inputs, "N") if outputs_first else ("N", num_inputs)
    check("weight", stored, (num_heads, *inner), (x.dtype,), like=x)
    if bias is not None:
        check("bias", bias, (weight.shape[1],), (x.dtype,), like=x)
    if not num_inputs:
        raise ValueError("x has 0 input features: expected at least 1")


def batch_invariant_matmul_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Reference implementation of `batch_invariant_matmul` in float64."""
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def batch_invariant_bmm_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Reference implementation of `batch_invariant_bmm` in float64."""
    return torch.stack([x[:, h].double() @ weight[h].double().T for h in range(len(weight))], 1)
