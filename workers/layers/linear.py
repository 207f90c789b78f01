"""Products of activations with weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.linear.cpu_packed_f32 import pack_f32
from penstock.kernels.linear.op import (
    PackedLinear,
    pack_batch_invariant,
    pack_int8,
    pack_onednn,
    supports_onednn,
)
from penstock.workers.parallel.groups import ProcessGroup


@dataclass(slots=True, eq=False)
class Linear:
    """y = x Wᵀ + b; several products of one x are fused, the rows of W one after another."""

    weight: Tensor  # [sum(sizes), in]; empty once quantized or fixed
    bias: Tensor | None  # [sum(sizes)]
    sizes: tuple[int, ...]  # outputs of each product
    packed: PackedLinear | None = None  # the loaded weights in a faster form

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed(x)
        return functional.linear(x, self.weight, self.bias)

    def pack_f32(self) -> None:
        """Keep the weights in panels only."""
        self.packed = pack_f32(self.weight, self.bias)
        self._drop_weight()

    def pack_onednn(self) -> None:
        """Keep a second copy of the weights that products with several rows read faster."""
        if supports_onednn(self.weight):
            self.packed = pack_onednn(self.weight, self.bias)

    def pack_int8(self) -> None:
        """Keep the weights in INT8 only."""
        self.packed = pack_int8(self.weight, self.bias)
        self._drop_weight()

    def pack_batch_invariant(self) -> None:
        """Keep the weights in a form that computes every row by itself, and in no other."""
        self.packed = pack_batch_invariant(self.weight, self.bias)
        self._drop_weight()

    def _drop_weight(self) -> None:
        self.weight = self.weight.new_empty(0, self.weight.shape[1])

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Where each product's weight and bias go, by the product's name in the checkpoint.

        With a single name: the checkpoint has them fused too, in the same order.
        """
        sizes = list(self.sizes) if len(names) > 1 else [sum(self.sizes)]
        weights = dict(zip(names, torch.split(self.weight, sizes), strict=True))
        found = {f"{name}.weight": tensor for name, tensor in weights.items()}
        if self.bias is not None:
            biases = zip(names, torch.split(self.bias, sizes), strict=True)
            found |= {f"{name}.bias": tensor for name, tensor in biases}
        return found


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """A product whose inputs are spread over ranks, each of which has a part of the sum."""

    linear: Linear  # with the bias, if there is one, on the first of the ranks
    group: ProcessGroup

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.linear(x))

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        return self.linear.tensors(names)


def empty_linear(
    num_inputs: int, sizes: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device
) -> Linear:
    """A `Linear` whose weights are yet to be loaded."""
    num_outputs = sum(sizes)
    return Linear(
        torch.empty(num_outputs, num_inputs, dtype=dtype, device=device),
        torch.empty(num_outputs, dtype=dtype, device=device) if bias else None,
        tuple(sizes),
    )
