"""Interface of linear methods: how the weights of a linear layer are stored, loaded and multiplied.

A linear method (the term of vLLM, SGLang and TensorRT-LLM) belongs to one `Linear`. `FloatMethod`
and `Int8Method` (`workers/layers/linear.py`) read float checkpoints; methods in
`workers/layers/quantized.py` read checkpoints that are quantized already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.workers.layers.linear import Linear
    from penstock.workers.layers.parameter import Parameter


class PackingOptions(Protocol):
    """The choices of a model that a method needs when it finishes a layer; see `Packer`."""

    @property
    def deterministic(self) -> bool: ...
    def pack_float(self, linear: Linear) -> None: ...


class LinearMethod(Protocol):
    """How a linear layer is stored in the checkpoint, loaded and multiplied."""

    @property
    def name(self) -> str:
        """Name for messages and for the KV layout string: equal names give equal numbers."""
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
        """Turn the loaded tensors into `linear.packed`, which multiplies, and free the others."""
        ...

    def finish_dense(self, linear: Linear) -> None:
        """Turn the loaded tensors into the float matrix `linear.weight`.

        For layers whose weights are also read transposed, as the up-projections of MLA are.
        """
        ...
