"""Mixture of experts with the experts divided among the ranks of a stage (expert parallel).

Every rank of a stage has the hidden states of all tokens, and chooses the experts of all tokens. A
choice is a pair of a token and an expert. A rank computes only the choices of its own experts, and
adds its slice of the shared expert. An all-reduce sums the results of the ranks:

    tokens 0 1 2 3   rank 0: choices of experts 0 1 2 ──▶ weighted sum ─┐
                     rank 1: choices of experts 3 4 5 ──▶ weighted sum ─┴─▶ sum ──▶ all ranks

A rank does not need to know how many choices other ranks have. The host therefore reads nothing
from the device, and a CUDA graph can capture the layer. Ranks with the same experts form a group;
each rank of a group has a slice of the intermediate features of all experts of the group. A rank
sums a token's results in the order of the token's choices. The all-reduce over ranks is the same
one as in other layers that are divided among ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.kernels.moe.op import ExpertWeights
from penstock.kernels.moe.routing import Routing, route
from penstock.kernels.step_graph.builder import GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.layout import Buffer
from penstock.workers.layers.expert_stacks import ExpertStack
from penstock.workers.layers.linear import Linear
from penstock.workers.layers.mlp import Mlp
from penstock.workers.layers.moe import SharedExpert, run_experts
from penstock.workers.parallel.collectives import ProcessGroup
from penstock.workers.parallel.mesh import MeshCoord


@dataclass(frozen=True, slots=True)
class ExpertParallelMoE:
    """Mixture of E experts; this rank has some of the experts, either complete or as slices."""

    router: Linear
    bias: Tensor | None  # [E] float32; affects the choice of experts, not their weights
    routing: Routing
    experts: tuple[Mlp, ...]  # this rank's experts, or slices of experts
    shared: SharedExpert | None  # this rank's slice of the shared expert
    # stacks by name; None: the checkpoint stores each expert separately
    stacks: dict[str, ExpertStack] | None
    coord: MeshCoord
    stage: ProcessGroup
    load: Tensor  # [E] int64: number of tokens for which each expert was chosen since the start
    grouped: ExpertWeights | None = None  # this rank's experts; see `MoE.grouped`
    # True: if `grouped` is used, a token's result does not depend on the batch
    batch_invariant: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, hidden], which is equal on all ranks, to [T, hidden]."""
        logits = self.router(x.to(self.router.weight.dtype))
        chosen, weights = route(logits, self.routing, self.bias)
        self._count(chosen)
        num_experts = len(self.load)
        here = chosen - self.coord.experts(num_experts).start
        out = run_experts(self, x, here, weights, num_experts)
        if self.shared is not None:
            out += self.shared(x)
        return self.stage.all_reduce(out)

    def lower(self, graph: GraphBuilder, x: Buffer, out: Buffer) -> None:
        raise UnsupportedGraph(
            "the CPU step graph does not support experts divided among several ranks"
        )

    def _count(self, chosen: Tensor) -> None:
        """Add the choices [T, k] to `load`, except in CUDA graphs, which have padding rows."""
        if chosen.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        ones = self.load.new_ones(1).expand(chosen.numel())
        # `bincount` would give the same counts, but would wait for the device
        self.load.index_add_(0, chosen.flatten(), ones)
