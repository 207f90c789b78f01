"""Methods that quantize the weights of a float checkpoint while they are loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from penstock.kernels.linear.op import int8_unsupported_reason, pack_int8_matrix
from penstock.kernels.linear.quantize_weights import GROUP_INPUTS, WeightForm, quantize_weight
from penstock.kernels.linear.quantized import QuantizedMatrix, pack_quantized
from penstock.kernels.linear.w8a8 import pack_w8a8
from penstock.workers.layers.expert_stacks import ExpertStack
from penstock.workers.layers.linear import FloatMethod, Linear, PackingOptions
from penstock.workers.layers.parameter import FLOATS, Parameter, Piece
from penstock.workers.weights.regions import Ranges, Region

METHOD_NAMES: dict[WeightForm, str] = {
    "int8": "int8",
    "fp8": "fp8 per channel, made while loading",
    "int4": f"int4 groups of {GROUP_INPUTS}, made while loading",
}
"""Names of the forms in the KV layout string; see `LinearMethod.name`."""


class OnlineMethod(FloatMethod):
    """Float weights in the checkpoint, quantized when the layer's last tensor is loaded.

    Whole rows are quantized: a rank that needs only some of the inputs loads all inputs, quantizes
    the rows and keeps its own inputs. The codes, scales and zero points are therefore equal for any
    number of ranks.

    INT8 weights use INT8 products, which quantize activations as well. On a CPU with
    AVX2 or AVX-512 VNNI, 4-bit weights use such products too, and on a GPU with FP8 tensor cores,
    FP8 weights use FP8 products. All other products are weight-only.

    Args:
        form: the form of quantization; see `quantize_weight`.
        inputs: the range of inputs that this rank keeps; None keeps all inputs. If a range is
            given, `linear.weight` must have all inputs.
    """

    def __init__(self, form: WeightForm, inputs: tuple[int, int] | None = None) -> None:
        self.form = form
        self.name = METHOD_NAMES[form]
        self._inputs = inputs

    def parameters(self, linear: Linear, names: Sequence[str]) -> dict[str, Parameter]:
        found = super().parameters(linear, names)
        if self._inputs is None:
            return found
        whole = {f"{name}.weight" for name in names}
        return {
            name: replace(each, region=()) if name in whole else each
            for name, each in found.items()
        }

    def finish(self, linear: Linear, packing: PackingOptions) -> None:
        linear.reorder_rows()
        matrix = quantize_weight(linear.weight, self.form)
        linear.weight = linear.weight.new_empty(0, linear.weight.shape[1])
        pack_codes(linear, own_inputs(matrix, self._inputs))


def own_inputs(matrix: QuantizedMatrix, inputs: tuple[int, int] | None) -> QuantizedMatrix:
    """Return the columns of `matrix` in this rank's range `inputs`; None: the whole matrix."""
    return matrix if inputs is None else matrix.take_inputs(*inputs)


def pack_codes(linear: Linear, matrix: QuantizedMatrix) -> None:
    """Replace the weights of `linear` by codes.

    Codes of `int8` and `int4` get products with INT8 activations, and codes of `fp8` products with
    FP8 activations, if the device has them.
    """
    dtype, device = linear.weight.dtype, matrix.codes.device
    if matrix.kind == "int8" and not int8_unsupported_reason(device, dtype):
        linear.packed = pack_int8_matrix(matrix, linear.bias)
    else:
        # INT8 activations add little error: rounding the weights to 4 bits has ten times the error
        # (`cpu_packed_int4`).
        linear.packed = pack_w8a8(matrix, linear.bias, matrix.kind) or pack_quantized(
            matrix, linear.bias, dtype, int8_activations=True
        )
    linear.weight = torch.empty(0, matrix.shape[1], dtype=dtype, device=device)


@dataclass(slots=True)
class OnlineStackMethod:
    """Quantizes the stacks of gpt-oss, [experts, in, out], one expert at a time.

    The weights are quantized and multiplied as in `OnlineMethod`.
    """

    form: WeightForm
    experts: range  # experts that this rank holds, by their numbers in the checkpoint
    outputs: Ranges | None  # outputs that this rank holds; None: all
    inputs: tuple[int, int] | None  # inputs that this rank holds; None: all
    num_inputs: int  # number of inputs of the layer on all ranks together
    _loaded: dict[int, Tensor] = field(default_factory=dict)
    _matrices: dict[int, QuantizedMatrix] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return METHOD_NAMES[self.form]

    def parameters(self, stack: ExpertStack, name: str) -> dict[str, Parameter]:
        weight = stack.linears[0].weight
        pieces = tuple(
            Piece(
                self._region(expert),
                partial(self._allocate, stack, number),
                partial(self._quantize, stack, number),
            )
            for number, expert in enumerate(self.experts)
        )
        shape = len(self.experts), self.num_inputs, len(weight)
        return {
            name: Parameter(stack, shape, weight.dtype, refuse_whole_stack, FLOATS, pieces=pieces)
        }

    def _region(self, expert: int) -> Region:
        return ((expert, expert + 1),), None, self.outputs

    def _allocate(self, stack: ExpertStack, number: int) -> Tensor:
        linear = stack.linears[number]
        device = linear.device or linear.weight.device
        self._loaded[number] = torch.empty(
            self.num_inputs, linear.weight.shape[0], dtype=linear.weight.dtype, device=device
        )
        return self._loaded[number]

    def _quantize(self, stack: ExpertStack, number: int) -> None:
        matrix = quantize_weight(self._loaded.pop(number).T, self.form)
        self._matrices[number] = own_inputs(matrix, self.inputs)

    def finish(self, stack: ExpertStack, packing: PackingOptions) -> None:
        for number, linear in enumerate(stack.linears):
            pack_codes(linear, self._matrices.pop(number))
        stack.weight = None


def refuse_whole_stack() -> Tensor:
    """Raise AssertionError: a stack is loaded through `Parameter.pieces`, not `data`."""
    raise AssertionError("a stack of experts is loaded one matrix at a time, not as a whole")
