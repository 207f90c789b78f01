"""Normalisation layers with their weights.

- `norm(x)` returns a new, normalised tensor.
- `norm.add_and_norm(hidden, x)` adds x to `hidden` in place and returns the normalised sum.
- `norm.normalize_(x)` normalises in place.
- `norm.lower(graph, x, out)` appends `out = norm(x)` to a CPU step graph, for some columns or all.
"""

from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from penstock.kernels.norm.op import (
    fused_add_gemma_rms_norm,
    fused_add_layer_norm,
    fused_add_rms_norm,
    gemma_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_,
)
from penstock.kernels.step_graph.builder import GraphBuilder, UnsupportedGraph
from penstock.kernels.step_graph.layout import Buffer
from penstock.workers.layers.parameter import Parameter, parameter


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """RMS norm over the last dimension, of size D."""

    weight: Tensor  # [D]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, hidden: Tensor, x: Tensor) -> Tensor:
        return fused_add_rms_norm(hidden, x, self.weight, self.eps)

    def normalize_(self, x: Tensor) -> None:
        rms_norm_(x, self.weight, self.eps)

    def lower(
        self, graph: GraphBuilder, x: Buffer, out: Buffer, columns: range | None = None
    ) -> None:
        graph.norm(x, self.weight, self.eps, out, columns)

    def parameters(self, name: str) -> dict[str, Parameter]:
        """Return the tensors to be loaded, by their names in the checkpoint."""
        return {f"{name}.weight": parameter(self, self.weight)}


@dataclass(frozen=True, slots=True)
class GemmaRmsNorm:
    """RMS norm that multiplies the normalised values by 1 + weight (Gemma)."""

    weight: Tensor  # [D]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return gemma_rms_norm(x, self.weight, self.eps)

    def add_and_norm(self, hidden: Tensor, x: Tensor) -> Tensor:
        return fused_add_gemma_rms_norm(hidden, x, self.weight, self.eps)

    def normalize_(self, x: Tensor) -> None:
        x.copy_(self(x))

    def lower(
        self, graph: GraphBuilder, x: Buffer, out: Buffer, columns: range | None = None
    ) -> None:
        graph.norm(x, 1.0 + self.weight, self.eps, out, columns)

    def parameters(self, name: str) -> dict[str, Parameter]:
        return {f"{name}.weight": parameter(self, self.weight)}


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Layer norm over the last dimension, of size D."""

    weight: Tensor  # [D]
    bias: Tensor  # [D]
    eps: float
    biased: bool = True  # whether the checkpoint has the bias; False: the bias is zero

    def __call__(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)

    def add_and_norm(self, hidden: Tensor, x: Tensor) -> Tensor:
        return fused_add_layer_norm(hidden, x, self.weight, self.bias, self.eps)

    def normalize_(self, x: Tensor) -> None:
        x.copy_(self(x))

    def lower(
        self, graph: GraphBuilder, x: Buffer, out: Buffer, columns: range | None = None
    ) -> None:
        raise UnsupportedGraph("the CPU step graph does not support a layer norm")

    def parameters(self, name: str) -> dict[str, Parameter]:
        found = {f"{name}.weight": parameter(self, self.weight)}
        return found | {f"{name}.bias": parameter(self, self.bias)} if self.biased else found


Norm: TypeAlias = RmsNorm | GemmaRmsNorm | LayerNorm
