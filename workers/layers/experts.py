"""The feed-forward layer as a mixture of experts."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.experts import mix_experts, route
from penstock.workers.layers.linear import Linear
from penstock.workers.layers.mlp import Mlp


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """What every token goes through beside its own experts, weighted by a gate of its own."""

    mlp: Mlp
    gate: Linear  # one output

    def __call__(self, x: Tensor) -> Tensor:
        return self.gate(x).sigmoid() * self.mlp(x)


@dataclass(frozen=True, slots=True)
class Experts:
    router: Linear
    experts: tuple[Mlp, ...]
    top_k: int
    normalise: bool  # whether the weights of the chosen sum to one
    shared: SharedExpert | None
    stacks: dict[str, Tensor] | None  # where the checkpoint has all experts in one: [E, in, out]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [T, hidden]."""
        chosen, weights = route(self.router(x), self.top_k, self.normalise)
        out = mix_experts(x, chosen, weights, len(self.experts), self._run)
        return out if self.shared is None else out + self.shared(x)

    def _run(self, expert: int, rows: Tensor) -> Tensor:
        return self.experts[expert](rows)
