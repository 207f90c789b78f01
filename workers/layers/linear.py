"""Linear layers of a model: fused, packed for a kernel, or divided among ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kernels.linear.cpu_packed_f32 import pack_f32
from penstock.kernels.linear.op import (
    PackedLinear,
    pack_batch_invariant,
    pack_onednn,
    supports_onednn,
)
from penstock.kernels.step_graph.builder import GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.layout import Buffer, ExpertLayout
from penstock.workers.layers.parameter import Parameter, parameter
from penstock.workers.parallel.collectives import ProcessGroup


class PackingOptions(Protocol):
    """Options of a model that linear methods read when they finish a layer; see `Packer`."""

    @property
    def deterministic(self) -> bool: ...
    def pack_float(self, linear: Linear) -> None: ...


class LinearMethod(Protocol):
    """Defines how a linear layer is stored in the checkpoint, loaded and multiplied.

    vLLM, SGLang and TensorRT-LLM use the same term. `FloatMethod` and `OnlineMethod` read float
    checkpoints; `QuantizedMethod` reads quantized checkpoints.
    """

    @property
    def name(self) -> str:
        """Name for messages and for the KV layout string.

        Methods with equal names compute equal results.
        """
        ...

    def parameters(self, linear: Linear, names: Sequence[str]) -> dict[str, Parameter]:
        """Return the tensors to be loaded, by their names in the checkpoint.

        Args:
            linear: the layer, whose memory is allocated when the first tensor is loaded.
            names: one module name per projection; or a single name if the projections are fused in
                the checkpoint too, in the same order.
        """
        ...

    def finish(self, linear: Linear, packing: PackingOptions) -> None:
        """Prepare the loaded weights for products; set `linear.packed` if a kernel needs it."""
        ...

    def finish_dense(self, linear: Linear) -> None:
        """Convert the loaded tensors to the float matrix `linear.weight`.

        Used for layers whose weights are also read transposed, such as MLA's up-projections.
        """
        ...


class FloatMethod:
    """Float weights, `NAME.weight` [out, in] in the checkpoint; float products."""

    name: str = "float"

    def parameters(self, linear: Linear, names: Sequence[str]) -> dict[str, Parameter]:
        sizes = linear.module_sizes(names)
        ends = list(itertools.accumulate(sizes))
        weights = {
            f"{name}.weight": Parameter(
                linear,
                (size, linear.weight.shape[1]),
                linear.weight.dtype,
                partial(linear.allocated_rows, end - size, end),
            )
            for name, size, end in zip(names, sizes, ends, strict=True)
        }
        return weights | linear.bias_parameters(names, sizes)

    def finish(self, linear: Linear, packing: PackingOptions) -> None:
        linear.reorder_rows()
        packing.pack_float(linear)

    def finish_dense(self, linear: Linear) -> None:
        linear.reorder_rows()


FLOAT = FloatMethod()


@dataclass(slots=True, eq=False)
class Linear:
    """The layer y = x Wᵀ + b. Projections of the same x are fused by concatenating rows of W."""

    # [sum(sizes), in]; on device `meta` until allocated, and empty once `packed` replaces `weight`
    weight: Tensor
    bias: Tensor | None  # [sum(sizes)]
    sizes: tuple[int, ...]  # number of outputs of each projection
    packed: PackedLinear | None = None  # the loaded weights, rearranged for a faster kernel
    device: torch.device | None = None  # device of the weights once they are allocated
    row_order: Tensor | None = None  # [sum(sizes)] row of the checkpoint for each row of `weight`
    method: LinearMethod = FLOAT  # how the weights are stored, loaded and multiplied

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return self.packed(x)
        return functional.linear(x, self.weight, self.bias)

    def lower(self, graph: GraphBuilder, x: Buffer, out: Buffer) -> None:
        """Append `out = self(x)` to a step graph. Raise UnsupportedGraph for unpacked weights."""
        graph.linear(x, self.packed, out)

    def lower_unpacked(self, graph: GraphBuilder, x: Buffer, out: Buffer) -> None:
        """Append `out = self(x)` to a step graph, for an unpacked layer (a router or a gate)."""
        if self.packed is not None or self.bias is not None:
            raise UnsupportedGraph(
                "the CPU step graph does not support an MoE router or gate that has packed "
                "weights or a bias"
            )
        graph.gemv(x, self.weight, out)

    def pack_f32(self) -> None:
        """Replace the weights by float32 panels, the layout that the CPU kernel reads."""
        self.packed = pack_f32(self.weight, self.bias)
        self._drop_weight()

    def pack_onednn(self) -> None:
        """Add a copy of the weights packed for oneDNN, which is faster for several rows."""
        if supports_onednn(self.weight):
            self.packed = pack_onednn(self.weight, self.bias)

    def pack_batch_invariant(self) -> None:
        """Replace the weights by a form with batch-invariant results: see `kernels/linear`."""
        self.packed = pack_batch_invariant(self.weight, self.bias)
        self._drop_weight()

    def _drop_weight(self) -> None:
        self.weight = self.weight.new_empty(0, self.weight.shape[1])

    def reorder_rows(self) -> None:
        """Apply `row_order` to the loaded weights and biases."""
        if self.row_order is not None:
            self.weight = self.weight[self.row_order]
            self.bias = None if self.bias is None else self.bias[self.row_order]
            self.row_order = None

    def parameters(self, names: Sequence[str]) -> dict[str, Parameter]:
        """Return the tensors to be loaded, by their names in the checkpoint: see `LinearMethod`."""
        return self.method.parameters(self, names)

    def bias_parameters(self, names: Sequence[str], sizes: Sequence[int]) -> dict[str, Parameter]:
        """Return the biases of modules `names` with `sizes` outputs, by their names."""
        if self.bias is None:
            return {}
        biases = zip(names, torch.split(self.bias, list(sizes)), strict=True)
        return {f"{name}.bias": parameter(self, rows) for name, rows in biases}

    def module_sizes(self, names: Sequence[str]) -> list[int]:
        """Return the number of outputs of each module of the checkpoint."""
        return list(self.sizes) if len(names) > 1 else [sum(self.sizes)]

    def allocated_rows(self, first: int, last: int) -> Tensor:
        """Return rows [first, last) of the weights; allocate the weights at the first call."""
        if self.weight.is_meta and self.device is not None:
            self.weight = torch.empty_like(self.weight, device=self.device)
        return self.weight[first:last]


@dataclass(frozen=True, slots=True)
class RowParallelLinear:
    """A linear layer whose input features are divided among ranks; an all-reduce sums the parts."""

    linear: Linear  # only the first rank has the bias, so that the bias is added once
    group: ProcessGroup

    def __call__(self, x: Tensor) -> Tensor:
        return self.group.all_reduce(self.linear(x))

    def lower(self, graph: GraphBuilder, x: Buffer, out: Buffer) -> None:
        raise UnsupportedGraph(
            "the CPU step graph does not support a linear layer divided among several ranks"
        )

    def parameters(self, names: Sequence[str]) -> dict[str, Parameter]:
        return self.linear.parameters(names)


def lower_expert_linears(
    graph: GraphBuilder,
    linears: Sequence[Linear | RowParallelLinear],
    x: Buffer,
    out: Buffer,
    layout: ExpertLayout,
) -> None:
    """Append `out = linear(x)` for each expert, with the expert's own `linear` and rows.

    `layout` gives the rows of each expert in x and out.
    """
    packed = [linear.packed if isinstance(linear, Linear) else None for linear in linears]
    graph.expert_linears(x, packed, out, layout)


def empty_linear(
    num_inputs: int, sizes: Sequence[int], bias: bool, dtype: torch.dtype, device: torch.device
) -> Linear:
    """Return a `Linear` whose weights are allocated when the first of them is loaded."""
    num_outputs = sum(sizes)
    return Linear(
        torch.empty(num_outputs, num_inputs, dtype=dtype, device="meta"),
        torch.empty(num_outputs, dtype=dtype, device=device) if bias else None,
        tuple(sizes),
        device=device,
    )
