"""The stacks of experts in MXFP4 checkpoints of gpt-oss, and their division among ranks.

A stack NAME is stored as three tensors:

- NAME_blocks [experts, out, in / 32, 16]: two e2m1 codes per byte, the lower bits first.
- NAME_scales [experts, out, in / 32]: e8m0 bytes.
- NAME_bias: floats.

The outputs of `gate_up_proj` alternate between gate and up, as in float stacks. (Float stacks have
another order of dimensions: [experts, in, out].)

Source: the conversion of MXFP4 tensors in `transformers`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.linear.quantized import QuantizedMatrix
from penstock.workers.layers.expert_stacks import ExpertStack
from penstock.workers.layers.linear import PackingOptions
from penstock.workers.layers.online_method import own_inputs, pack_codes, refuse_whole_stack
from penstock.workers.layers.parameter import Parameter, Piece
from penstock.workers.models.config import UnsupportedModel
from penstock.workers.weights.fp4_layouts import e2m1_matrix, e8m0_scales
from penstock.workers.weights.quantized_module import QuantizedModule, input_range
from penstock.workers.weights.regions import Ranges, Region
from penstock.workers.weights.sharding import stack_cut

BLOCK = 32
"""Number of inputs that share a scale."""

_BLOCK_BYTES = BLOCK // 2


@dataclass(slots=True)
class Mxfp4StackMethod:
    """Experts with e2m1 codes and e8m0 scales; their products are weight-only.

    A rank that needs only some of the inputs loads every block that contains one of these inputs.
    """

    module: QuantizedModule  # one expert's projection in the whole model, under the stack's name
    experts: range  # experts that this rank holds, by their numbers in the checkpoint
    outputs: Ranges | None  # outputs that this rank holds; None: all
    inputs: tuple[int, int] | None  # inputs that this rank holds; None: all
    _blocks: dict[int, Tensor] = field(default_factory=dict)
    _scales: dict[int, Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.module.scheme.name

    def parameters(self, stack: ExpertStack, name: str) -> dict[str, Parameter]:
        linear = stack.linears[0]
        device = linear.device or linear.weight.device
        first, last = self._block_range()
        shape = len(self.experts), len(linear.weight), last - first
        return {
            f"{name}_blocks": self._parameter(stack, (*shape, _BLOCK_BYTES), self._blocks, device),
            f"{name}_scales": self._parameter(stack, shape, self._scales, device),
        }

    def _parameter(
        self, stack: ExpertStack, shape: tuple[int, ...], loaded: dict[int, Tensor],
        device: torch.device,
    ) -> Parameter:  # fmt: skip
        """Return the parameter of one stored tensor, with one `Piece` per expert."""
        region: Region = (self.outputs, None if self.inputs is None else (self._block_range(),))
        pieces = tuple(
            Piece(
                (((expert, expert + 1),), *region),
                partial(_allocate, loaded, number, shape[1:], device),
                lambda: None,
            )
            for number, expert in enumerate(self.experts)
        )
        return Parameter(stack, shape, torch.uint8, refuse_whole_stack, ("U8",), pieces=pieces)

    def _block_range(self) -> tuple[int, int]:
        first, last = self.inputs or (0, self.module.inputs)
        return first // BLOCK, -(-last // BLOCK)

    def finish(self, stack: ExpertStack, packing: PackingOptions) -> None:
        for number, linear in enumerate(stack.linears):
            pack_codes(linear, self._matrix(number))
        stack.weight = None

    def _matrix(self, number: int) -> QuantizedMatrix:
        codes = self._blocks.pop(number).flatten(1)
        scales = e8m0_scales(f"{self.module.name}_scales", self._scales.pop(number))
        first, _ = self._block_range()
        inputs = self.inputs
        if inputs is not None:
            inputs = inputs[0] - first * BLOCK, inputs[1] - first * BLOCK
        return own_inputs(e2m1_matrix(codes, scales, BLOCK), inputs)


def _allocate(
    loaded: dict[int, Tensor], number: int, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    loaded[number] = torch.empty(shape, dtype=torch.uint8, device=device)
    return loaded[number]


def check_mxfp4_stack(module: QuantizedModule) -> None:
    """Raise UnsupportedModel if a stack's number of inputs is not a multiple of `BLOCK`."""
    if module.inputs % BLOCK:
        raise UnsupportedModel(
            f"{module.name} has {module.inputs} inputs: expected a multiple of {BLOCK}, the inputs "
            "of an MXFP4 block"
        )


def mxfp4_stack_method(
    module: QuantizedModule, stack: ExpertStack, region: Region
) -> Mxfp4StackMethod:
    """Return the method of a rank's stack.

    Args:
        module: one expert's projection in the whole model.
        region: the rank's part of the float stack [experts, in, out].

    Raises:
        BadShape: A rank would have an odd number of inputs.
    """
    experts, columns, outputs = stack_cut(region, len(stack.linears))
    inputs = input_range(module.name, columns, in_pairs=True)
    return Mxfp4StackMethod(module, experts, outputs, inputs)
