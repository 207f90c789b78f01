"""Linear layers of a model: fused, packed for a kernel, or divided among ranks."""

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
    """The layer y = x Wᵀ + b. Projections of the same x are fused by concatenating rows of W."""

    weight: Tensor  # [sum(sizes), in]; empty if `packed` replaces the weights
    bias: Tensor | None  # [sum(sizes)]
    sizes: tuple[int, ...]  # number of outputs of each projection
    packed: PackedLinear | None = None  # the loaded weights, rearranged for a faster kernel

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed(x)
        return functional.linear(x, self.weight, self.bias)

    def pack_f32(self) -> None:
        """Replace the weights by float32 panels, the layout that the CPU kernel reads."""
        self.packed = pack_f32(self.weight, self.bias)
        self._drop_weight()

    def pack_onednn(self) -> None:
        """Add a copy of the weights packed for oneDNN; oneDNN is faster for several rows."""
        if supports_onednn(self.weight):
            self.packed = pack_onednn(self.weight, self.bias)

    def pack_int8(self) -> None:
        """Replace the weights by weights quantized to INT8."""
        self.packed = pack_int8(self.weight, self.bias)
        self._drop_weight()

    def pack_batch_invariant(self) -> None:
        """Replace the weights by a form for batch-invariant results: see `kernels/linear`."""
        self.packed = pack_batch_invariant(self.weight, self.bias)
        self._drop_weight()

    def _drop_weight(self) -> None:
        self.weight = self.weight.new_empty(0, self.weight.shape[1])

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return views of weights and biases, to be loaded, by their names in the checkpoint.

        Args:
            names: one name per projection; or a single name if the projections are fused in the
                checkpoint too, in the same order.
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
    """A linear layer whose input features are divided among ranks; an all-reduce sums the parts."""

    linear: Linear  # only the first rank has the bias, so that the bias is added once
    group: ProcessGroup

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.linear(x))

    def tensors(self, names: Sequence[str]) -> dict[str, Tensor]:
        return self.linear.tensors(names)


def empty_linear(
    num_inputs: int, sizes: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device
) -> Linear:
    """Return a `Linear` with uninitialised weights."""
    num_outputs = sum(sizes)
    return Linear(
        torch.empty(num_outputs, num_inputs, dtype=dtype, device=device),
        torch.empty(num_outputs, dtype=dtype, device=device) if bias else None,
        tuple(sizes),
    )
