"""Experts stored as stacks: a tensor has one projection of all experts of a layer (gpt-oss)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from penstock.workers.layers.linear import Linear, PackingOptions
from penstock.workers.layers.parameter import Parameter, parameter


class StackMethod(Protocol):
    """Defines how a stack of experts is stored, loaded and multiplied, like a `LinearMethod`."""

    @property
    def name(self) -> str: ...

    def parameters(self, stack: ExpertStack, name: str) -> Mapping[str, Parameter]:
        """Return the weights to be loaded, without biases, by their names in the checkpoint.

        Args:
            stack: the stack, which owns the parameters.
            name: name of the stack in the checkpoint, such as "...experts.down_proj".
        """
        ...

    def finish(self, stack: ExpertStack, packing: PackingOptions) -> None:
        """Prepare the loaded weights of all experts for matrix multiplication."""
        ...


class FloatStackMethod:
    """Float weights, [experts, in, out] in the checkpoint; the experts' weights are views."""

    name = "float"

    def parameters(self, stack: ExpertStack, name: str) -> dict[str, Parameter]:
        assert stack.weight is not None
        return {name: parameter(stack, stack.weight)}

    def finish(self, stack: ExpertStack, packing: PackingOptions) -> None:
        for linear in stack.linears:
            linear.method.finish(linear, packing)
        if not stack.is_grouped and not any(linear.weight.numel() for linear in stack.linears):
            stack.weight = None


@dataclass(slots=True, eq=False)
class ExpertStack:
    """One projection of a layer, for all experts on this rank."""

    weight: Tensor | None  # [E, in, out]; None after packing, which copies the weights
    bias: Tensor | None  # [E, out]
    linears: tuple[Linear, ...]  # one layer per expert
    is_grouped: bool = False  # True: one kernel computes all experts and reads `weight`
    method: StackMethod = field(default_factory=FloatStackMethod)

    def parameters(self, name: str) -> dict[str, Parameter]:
        """Return the tensors to be loaded, by their names in the checkpoint."""
        found = dict(self.method.parameters(self, name))
        if self.bias is not None:
            found[f"{name}_bias"] = parameter(self, self.bias)
        return found
