"""Packs loaded weights: replaces each linear layer's weights by the fastest form."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from penstock.kernels.linear.cpu_packed_f32 import supports_packed_f32
from penstock.kernels.linear.op import (
    batch_invariant_unsupported_reason,
    int8_unsupported_reason,
    supports_onednn,
)
from penstock.kernels.linear.quantize_weights import WEIGHT_FORMS, WeightForm
from penstock.kernels.linear.quantized import supports_dequantizing
from penstock.kernels.linear.w8a8 import has_w8a8_products
from penstock.kernels.triton_common.launch import runs_kernels
from penstock.workers.layers.available_memory import available_bytes
from penstock.workers.layers.expert_stacks import ExpertStack
from penstock.workers.layers.linear import FloatMethod, Linear
from penstock.workers.layers.mla import LatentAttention
from penstock.workers.layers.online_method import OnlineMethod

MIN_WEIGHTS = 1 << 14
"""Smallest number of weights for which packing pays off."""

MEMORY_FRACTION = 0.125
"""Largest fraction of the available memory that a second copy of the weights may take."""


def weight_form(quantization: str) -> WeightForm | None:
    """Return the form that the option `quantization` names; None for "none" and "float"."""
    return next((form for form in WEIGHT_FORMS if form == quantization), None)


def check_quantization(
    name: str, device: torch.device, dtype: torch.dtype, deterministic: bool = False
) -> None:
    """Raise ValueError if this quantization is not available for the device and dtype."""
    form = weight_form(name)
    if form is None or has_online_w8a8(form, device):
        return
    if form == "int8" and not runs_kernels(device):
        if reason := int8_unsupported_reason(device, dtype):
            raise ValueError(f"quantization int8 is not available: {reason}")
    elif deterministic and not supports_dequantizing(device, dtype):
        raise not_deterministic(f"{name} weights", device, dtype)


def has_online_w8a8(form: WeightForm, device: torch.device) -> bool:
    """Return whether weights made while loading are multiplied by quantized activations on a GPU.

    Such products are batch-invariant.
    """
    return form != "int4" and has_w8a8_products(form, device)


def not_deterministic(what: str, device: torch.device, dtype: torch.dtype) -> ValueError:
    """Return the error that layers of kind `what` are not batch-invariant on this device."""
    return ValueError(
        f"deterministic mode is not available: {what} need a CPU with AVX2 (with dtype float32 and "
        "numba), or a GPU that supports W8A8 products for these weights; the device is "
        f"{device.type}, and the dtype is {str(dtype).removeprefix('torch.')}"
    )


def check_deterministic(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError if batch-invariant layers are not available for the device and dtype."""
    if reason := batch_invariant_unsupported_reason(device, dtype):
        raise ValueError(f"deterministic mode is not available: {reason}")


class Packer:
    """Packs the modules of a model, each as soon as its parameters are loaded.

    Args:
        model: a tree of dataclasses and tuples that contains every `Linear`.
        deterministic: pack for batch-invariant kernels, even if other kernels are faster.
    """

    def __init__(self, model: Any, deterministic: bool) -> None:
        self.deterministic = deterministic
        found = [linear for linear in linears(model) if is_packable(linear, linear.weight)]
        self._worthwhile = {id(linear) for linear in found}
        self._weight_bytes = sum(linear.weight.nbytes for linear in found)
        self._bytes_left = sum(linear.weight.nbytes for linear in found if linear.weight.is_meta)

    def finish(self, module: object) -> None:
        """Pack a module of the model whose parameters are all loaded; see `Parameter.owner`."""
        if isinstance(module, ExpertStack):
            module.method.finish(module, self)
        elif isinstance(module, LatentAttention):
            module.up.method.finish_dense(module.up)
            if self.deterministic:
                module.pack_batch_invariant()
        elif isinstance(module, Linear) and module.packed is None:
            module.method.finish(module, self)

    @cached_property
    def _copies_fit(self) -> bool:
        """Whether copies of all weights fit in `MEMORY_FRACTION` of memory free after loading."""
        return self._weight_bytes <= MEMORY_FRACTION * (available_bytes() - self._bytes_left)

    def pack_float(self, linear: Linear) -> None:
        """Pack float weights for the fastest kernel, if packing pays off."""
        is_worthwhile = id(linear) in self._worthwhile
        if self.deterministic:
            linear.pack_batch_invariant()
        elif is_worthwhile and supports_packed_f32(linear.weight):
            linear.pack_f32()
        elif is_worthwhile and supports_onednn(linear.weight) and self._copies_fit:
            linear.pack_onednn()


def is_packable(linear: Linear, whole: torch.Tensor) -> bool:
    """Return whether packing or quantization of a float layer pays off.

    Args:
        linear: the layer, or a rank's part of it.
        whole: the layer's weights in the whole model.
    """
    return isinstance(linear.method, FloatMethod) and whole.numel() >= MIN_WEIGHTS


def pack(model: Any, quantization: str, deterministic: bool = False) -> None:
    """Pack the modules of a loaded model in place: see `Packer`.

    Args:
        quantization: "none", or the form to which float weights are quantized; see `weight_form`.
    """
    form = weight_form(quantization)
    for linear in linears(model):
        if form is not None and is_packable(linear, linear.weight):
            linear.method = OnlineMethod(form)
    packer = Packer(model, deterministic)
    for module in iter_modules(model, ("up",)):
        if isinstance(module, Linear | LatentAttention):
            packer.finish(module)


def linears(model: Any) -> Iterator[Linear]:
    """Yield every `Linear` in a tree of dataclasses, except MoE routers and the `up` of MLA."""
    unpacked = ("router", "up")
    return (module for module in iter_modules(model, unpacked) if isinstance(module, Linear))


def iter_modules(module: Any, without: Sequence[str] = ()) -> Iterator[Any]:
    """Yield every dataclass in a tree of dataclasses and tuples; skip fields named in `without`."""
    if isinstance(module, tuple):
        for each in module:
            yield from iter_modules(each, without)
    elif dataclasses.is_dataclass(module):
        yield module
        for field in dataclasses.fields(module):
            if field.name not in without:
                yield from iter_modules(getattr(module, field.name), without)
