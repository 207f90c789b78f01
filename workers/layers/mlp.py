"""Feed-forward layer, with or without a gate."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.activation.op import (
    gelu_tanh_and_mul,
    silu_and_mul,
    silu_and_mul_batch_invariant,
)
from penstock.kernels.linear.cpu_packed_int8 import PackedLinearInt8
from penstock.kernels.linear.gate_kinds import SILU, TANH_GELU
from penstock.kernels.step_graph.builder import GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.layout import Buffer
from penstock.workers.layers.linear import Linear, RowParallelLinear

STEP_GRAPH_GATES: dict[Callable[[Tensor], Tensor], str] = {
    silu_and_mul: "silu",
    silu_and_mul_batch_invariant: "silu",
    gelu_tanh_and_mul: "gelu",
}
"""Gated activations that CPU step graphs support."""

FUSED_GATES: dict[Callable[[Tensor], Tensor], int] = {
    silu_and_mul: SILU,
    silu_and_mul_batch_invariant: SILU,
    gelu_tanh_and_mul: TANH_GELU,
}
"""Gated activations that a linear layer can compute with its product, see `PackedLinearInt8`."""


@dataclass(frozen=True, slots=True)
class Mlp:
    """Feed-forward layer. A gated activation maps the output of `gate_up` to act(gate) * up."""

    gate_up: Linear  # the gate and up projections; only the up projection if there is no gate
    down: Linear | RowParallelLinear
    activation: Callable[[Tensor], Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._activated(x))

    def _activated(self, x: Tensor) -> Tensor:
        packed, gate = self.gate_up.packed, FUSED_GATES.get(self.activation)
        if isinstance(packed, PackedLinearInt8) and gate is not None and packed.fuses_gate(len(x)):
            return packed.gated(x, gate)
        return self.activation(self.gate_up(x))

    def lower(self, graph: GraphBuilder, x: Buffer, out: Buffer) -> None:
        """Append `out = self(x)` to a CPU step graph."""
        width = sum(self.gate_up.sizes)
        both, inner = graph.scratch("gate and up", width), graph.scratch("gated", width // 2)
        self.gate_up.lower(graph, x, both)
        graph.gate(both, self.gate_kind(), inner)
        self.down.lower(graph, inner, out)

    def gate_kind(self) -> str:
        """Return the step graph's name of the activation; raise UnsupportedGraph if it has none."""
        kind = STEP_GRAPH_GATES.get(self.activation)
        if kind is None:
            raise UnsupportedGraph(
                "the CPU step graph does not support an activation other than gated SiLU or GELU "
                "(tanh)"
            )
        return kind
