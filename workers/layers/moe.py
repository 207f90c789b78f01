"""Mixture-of-experts feed-forward layer with all experts on one rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from penstock.kernels.activation.op import sigmoid
from penstock.kernels.moe.expert_loop import moe_forward
from penstock.kernels.moe.op import ExpertWeights, grouped_moe_forward
from penstock.kernels.moe.routing import Routing, route
from penstock.kernels.step_graph.builder import GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.layout import Buffer, ExpertLayout
from penstock.workers.layers.expert_stacks import ExpertStack
from penstock.workers.layers.linear import Linear, lower_expert_linears
from penstock.workers.layers.mlp import Mlp


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Expert that is applied to every token in addition to the token's routed experts."""

    mlp: Mlp
    gate: Linear | None  # layer with one output, whose sigmoid multiplies the expert's result

    def __call__(self, x: Tensor) -> Tensor:
        made = self.mlp(x)
        return made if self.gate is None else sigmoid(self.gate(x)) * made

    def lower(self, graph: GraphBuilder, x: Buffer) -> tuple[Buffer, Buffer | None]:
        """Append the expert to a CPU step graph; return the outputs of `mlp` and of `gate`.

        The caller multiplies by the gate's sigmoid when it adds the routed experts.
        """
        made, gate = graph.scratch("shared expert", x.width), None
        if self.gate is not None:
            gate = graph.scratch("gate of the shared expert", 1)
            self.gate.lower_unpacked(graph, x, gate)
        self.mlp.lower(graph, x, made)
        return made, gate


@dataclass(frozen=True, slots=True)
class MoE:
    """Mixture-of-experts layer with E experts, all on this rank."""

    router: Linear
    bias: Tensor | None  # [E] float32; affects the choice of experts, not their weights
    routing: Routing
    experts: tuple[Mlp, ...]
    shared: SharedExpert | None
    # stacks by name; None: the checkpoint stores each expert separately
    stacks: dict[str, ExpertStack] | None
    grouped: ExpertWeights | None = (
        None  # weights of `experts`, for the GPU kernel that runs all experts in one launch
    )
    # True: if `grouped` is used, a token's result does not depend on the batch
    batch_invariant: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to [T, hidden]."""
        logits = self.router(x.to(self.router.weight.dtype))
        chosen, weights = route(logits, self.routing, self.bias)
        out = run_experts(self, x, chosen, weights)
        return out if self.shared is None else out + self.shared(x)

    def lower(self, graph: GraphBuilder, x: Buffer, out: Buffer) -> None:
        """Append `out = self(x)` to a CPU step graph."""
        routing, num_experts = self.routing, len(self.experts)
        if routing != Routing(routing.top_k, routing.normalise) or self.bias is not None:
            raise UnsupportedGraph(
                "the CPU step graph supports only top-k routing by softmax, without groups, scale "
                f"or bias, not {routing}{' with a bias' if self.bias is not None else ''}"
            )
        layout = graph.expert_layout(num_experts, routing.top_k)
        logits = graph.scratch("router logits", num_experts)
        weights = graph.scratch("expert weights", routing.top_k)
        self.router.lower_unpacked(graph, x, logits)
        graph.topk_softmax(logits, layout, routing.normalise, weights)
        # The shared expert is computed before the routed experts. Threads that wait for the routing
        # can then prefetch the shared expert's weights.
        shared, gate = (None, None) if self.shared is None else self.shared.lower(graph, x)
        rows = graph.scratch("expert inputs", x.width, layout)
        made = graph.scratch("expert outputs", out.width, layout)
        graph.permute(x, layout, rows)
        self._lower_experts(graph, rows, made, layout)
        graph.unpermute_sum(made, layout, weights, out, shared, gate)

    def _lower_experts(
        self, graph: GraphBuilder, x: Buffer, out: Buffer, layout: ExpertLayout
    ) -> None:
        """Append `out = expert(x)` for each expert's rows, with the operations of `Mlp.lower`."""
        first = self.experts[0]
        width = sum(first.gate_up.sizes)
        both = graph.scratch("gate and up", width, layout)
        inner = graph.scratch("gated", width // 2, layout)
        lower_expert_linears(graph, [expert.gate_up for expert in self.experts], x, both, layout)
        graph.gate(both, first.gate_kind(), inner, layout)
        lower_expert_linears(graph, [expert.down for expert in self.experts], inner, out, layout)


class Experts(Protocol):
    """Interface to the experts of a layer on this rank; `MoE` describes the attributes."""

    @property
    def experts(self) -> Sequence[Mlp]: ...
    @property
    def grouped(self) -> ExpertWeights | None: ...
    @property
    def batch_invariant(self) -> bool: ...


def run_experts(
    layer: Experts, x: Tensor, chosen: Tensor, weights: Tensor, num_divided: int | None = None
) -> Tensor:
    """Return the weighted sum [T, hidden] of the outputs of each token's experts.

    Args:
        layer: the experts.
        x: [T, hidden].
        chosen: [T, k] numbers of the chosen experts, counted from the layer's first expert.
        weights: [T, k] their weights.
        num_divided: number of experts of all ranks, if `layer` has only some of them. Choices of
            experts that `layer` does not have add nothing to the sum.
    """
    if layer.grouped is not None:
        return grouped_moe_forward(
            x, chosen, weights, layer.grouped, layer.batch_invariant, num_divided
        )
    return moe_forward(
        x,
        chosen,
        weights,
        len(layer.experts),
        lambda expert, rows: layer.experts[expert](rows),
        partial=num_divided is not None,
    )
