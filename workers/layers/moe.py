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
    gate: Linear | None  # the expert's result is multiplied by the sigmoid of the gate's one output

    def __call__(self, x: Tensor) -> Tensor:
        made = self.mlp(x)
        return made if self.gate is None else sigmoid(self.gate(x)) * made


@dataclass(frozen=True, slots=True)
class MoE:
    """Mixture of E experts."""

    router: Linear
    bias: Tensor | None  # [E] float32, added when experts are chosen, but not to their weights
    routing: Routing
    experts: tuple[Mlp, ...]
    shared: SharedExpert | None
    stacks: dict[str, Tensor] | None  # [E, in, out], if the checkpoint stacks the experts
    grouped: ExpertWeights | None = (
        None  # the same weights, for the GPU kernel that runs all experts in one launch
    )
    batch_invariant: bool = False  # with `grouped`: make a token's result independent of others

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to [T, hidden]."""
        logits = self.router(x.to(self.router.weight.dtype))
        chosen, weights = route(logits, self.routing, self.bias)
        if self.grouped is not None:
            out = grouped_moe_forward(x, chosen, weights, self.grouped, self.batch_invariant)
        else:
            out = moe_forward(x, chosen, weights, len(self.experts), self._run)
        return out if self.shared is None else out + self.shared(x)

    def _run(self, expert: int, rows: Tensor) -> Tensor:
        return self.experts[expert](rows)
