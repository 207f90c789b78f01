"""The feed-forward layer as a mixture of experts."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.activation.op import sigmoid
from penstock.kernels.moe.op import ExpertWeights, grouped_moe_forward, moe_forward
from penstock.kernels.moe.routing import Routing, route
from penstock.workers.layers.linear import Linear
from penstock.workers.layers.mlp import Mlp


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """What every token goes through beside its own experts."""

    mlp: Mlp
    gate: Linear | None  # one output: the weight of what it gives

    def __call__(self, x: Tensor) -> Tensor:
        made = self.mlp(x)
        return made if self.gate is None else sigmoid(self.gate(x)) * made


@dataclass(frozen=True, slots=True)
class MoE:
    router: Linear
    bias: Tensor | None  # [E] float32, of the choice
    routing: Routing
    experts: tuple[Mlp, ...]
    shared: SharedExpert | None
    stacks: dict[str, Tensor] | None  # where the checkpoint has all experts in one: [E, in, out]
    grouped: ExpertWeights | None = (
        None  # the same weights on a GPU, which computes all experts at once
    )
    batch_invariant: bool = False  # there: whether no bit of a token depends on other tokens

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, hidden]."""
        logits = self.router(x.to(self.router.weight.dtype))
        chosen, weights = route(logits, self.routing, self.bias)
        if self.grouped is not None:
            out = grouped_moe_forward(x, chosen, weights, self.grouped, self.batch_invariant)
        else:
            out = moe_forward(x, chosen, weights, len(self.experts), self._run)
        return out if self.shared is None else out + self.shared(x)

    def _run(self, expert: int, rows: Tensor) -> Tensor:
        return self.experts[expert](rows)
