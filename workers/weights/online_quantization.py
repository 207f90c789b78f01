"""Choice of the layers of a float checkpoint that are quantized while they are loaded."""

import logging
from collections.abc import Mapping

import torch

from penstock.kernels.linear.quantize_weights import WeightForm
from penstock.kernels.triton_common.launch import runs_kernels
from penstock.workers.layers.expert_stacks import ExpertStack
from penstock.workers.layers.linear import Linear
from penstock.workers.layers.online_method import OnlineMethod, OnlineStackMethod
from penstock.workers.layers.packing import has_online_w8a8, is_packable, linears
from penstock.workers.models.config import UnsupportedModel
from penstock.workers.models.decoder import Decoder
from penstock.workers.weights.quantized_module import input_range
from penstock.workers.weights.regions import Ranges, Region
from penstock.workers.weights.sharding import stack_cut

log = logging.getLogger(__name__)


def assign_online_methods(
    decoder: Decoder, whole: Decoder, form: WeightForm, regions: Mapping[str, Region]
) -> None:
    """Set the method of each layer of `decoder` that is quantized to `form` while loading.

    Whether a layer is quantized depends on its size in the whole model, so that all ranks quantize
    the same layers. MoE routers stay float, because a rounding error could select another expert.
    The `up` of MLA stays float, because its weights are also read transposed.

    Args:
        decoder: a rank's shard.
        whole: the decoder of the whole model, on the `meta` device.
        regions: the rank's regions of tensors; see `sharding.regions`.

    Raises:
        UnsupportedModel: `form` is "int4", and a layer has an odd number of inputs.
        BadShape: `form` is "int4", and a rank has an odd number of a layer's inputs.
    """
    quantizable = {id(linear) for linear in linears(decoder)}
    sizes = {names: linear.weight for names, linear in whole.linears()}
    for names, linear in decoder.linears():
        weight = sizes[names]
        if id(linear) in quantizable and is_packable(linear, weight):
            _, columns = (*regions.get(f"{names[0]}.weight", ()), None, None)[:2]
            _assign(names[0], linear, weight, form, columns)
    head = decoder.head
    if head is not None and decoder.spec.tie_embeddings:
        assert whole.head is not None
        if is_packable(head, whole.head.weight):
            _assign(decoder.spec.names.embeddings, head, whole.head.weight, form, None)
    stacks = dict(whole.stacks())
    for name, stack in decoder.stacks():
        stacked = stacks[name].weight
        assert stacked is not None
        _assign_stack(name, stack, stacked, form, regions.get(name, ()))


def _assign(
    name: str, linear: Linear, whole: torch.Tensor, form: WeightForm, columns: Ranges | None
) -> None:
    num_inputs = whole.shape[1]
    inputs = _checked_inputs(name, num_inputs, form, columns)
    if inputs is not None:
        linear.weight = torch.empty(
            len(linear.weight), num_inputs, dtype=linear.weight.dtype, device="meta"
        )
    linear.method = OnlineMethod(form, inputs)


def _assign_stack(
    name: str, stack: ExpertStack, whole: torch.Tensor, form: WeightForm, region: Region
) -> None:
    """Set the method of a stack of experts; `whole` is [experts, in, out]."""
    experts, columns, outputs = stack_cut(region, len(whole))
    inputs = _checked_inputs(name, whole.shape[1], form, columns)
    stack.method = OnlineStackMethod(form, experts, outputs, inputs, whole.shape[1])


def _checked_inputs(
    name: str, num_inputs: int, form: WeightForm, columns: Ranges | None
) -> tuple[int, int] | None:
    """Return the range of a rank's inputs; None for all.

    4-bit codes are stored in pairs: raise UnsupportedModel or BadShape for an odd number of inputs.
    """
    if form == "int4" and num_inputs % 2:
        raise UnsupportedModel(
            f"{name} has {num_inputs} inputs, an odd number: quantization int4 stores codes in "
            "pairs; set quantization to 'int8' or 'fp8'"
        )
    return input_range(name, columns, in_pairs=form == "int4")


def log_online_weight_only(form: WeightForm, device: torch.device) -> None:
    """Log a warning if a GPU lacks the tensor cores that `form` uses on other GPUs."""
    if form != "int4" and runs_kernels(device) and not has_online_w8a8(form, device):
        log.warning(
            "%s matrix multiplication is not available on this %s device: weights are quantized, "
            "and activations are not quantized (weight-only)", form.upper(), device.type,
        )  # fmt: skip
