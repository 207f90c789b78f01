"""Mixture-of-experts feed-forward layer with all experts on one rank."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.activation.op import sigmoid
from penstock.kernels.moe.expert_loop import moe_forward
from penstock.kernels.moe.op import ExpertWeights, grouped_moe_forward
from penstock.kernels.moe.routing import Routing, route
from penstock.workers.layers.linear import Linear
from penstock.workers.layers.mlp import Mlp


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """Expert that is applied to every token in addition to the token's routed experts."""

    mlp: Mlp
    gate: Linear | None  # one output, whose sigmoid scales the expert's result

    def __call__(self, x: Tensor) -> Tensor:
        made = self.mlp(x)
        return made if self.gate is None else sigmoid(self.gate(x)) * made


@dataclass(frozen=True, slots=True)
class MoE:
    """Mixture of E experts."""

    router: Linear
    bias: Tensor | None  # [E] float32, affects which experts are chosen but not their weights
    routing: Routing
    experts: tuple[Mlp, ...]
    shared: SharedExpert | None
    stacks: dict[str, Tensor] | None  # if the checkpoint stacks all experts: [E, in, out]
    grouped: ExpertWeights | None = (
        None  # the same weights for the grouped GPU kernel, which computes all experts at once
    )
    batch_invariant: bool = False  # for `grouped`: a token's bits do not depend on other tokens

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the layer: x [T, hidden] to [T, hidden]."""
        logits = self.router(x.to(self.router.weight.dtype))
        chosen, weights = route(logits, self.routing, self.bias)
        if self.grouped is not None:
            out = grouped_moe_forward(x, chosen, weights, self.grouped, self.batch_invariant)
        else:
            out = moe_forward(x, chosen, weights, len(self.experts), self._run)
        return out if self.shared is None else out + self.shared(x)

    def _run(self, expert: int, rows: Tensor) -> Tensor:
        return self.experts[expert](rows)
