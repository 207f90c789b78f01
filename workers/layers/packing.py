"""Packs loaded weights: replaces each linear layer's weights by the fastest form."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from penstock.kernels.linear.cpu_packed_f32 import supports_packed_f32
from penstock.kernels.linear.op import (
    batch_invariant_unsupported_reason,
    int8_unsupported_reason,
    supports_onednn,
)
from penstock.workers.layers.linear import Linear
from penstock.workers.layers.mla import LatentAttention

MIN_WEIGHTS = 1 << 14
"""Smallest number of weights for which packing pays off."""

MEMORY_FRACTION = 0.125
"""Largest share of the available memory that a second copy of the weights may take."""


def check_quantization(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError if this quantization is not available for the device and dtype."""
    if name == "int8" and (reason := int8_unsupported_reason(device, dtype)):
        raise ValueError(f"quantization int8 is not available: {reason}")


def check_deterministic(device: torch.device, dtype: torch.dtype) -> None:
    """Raise ValueError if batch-invariant layers are not available for the device and dtype."""
    if reason := batch_invariant_unsupported_reason(device, dtype):
        raise ValueError(f"deterministic mode is not available: {reason}")


def pack(model: Any, quantization: str, deterministic: bool = False) -> None:
    """Pack the linear layers of a loaded model in place.

    MoE routers are not quantized, because a rounding error of a router could select another expert.

    Args:
        model: a tree of dataclasses and tuples that contains every `Linear`.
        quantization: "int8" or "none".
        deterministic: pack for batch-invariant kernels, even where others are faster.
    """
    found = [linear for linear in linears(model) if linear.weight.numel() >= MIN_WEIGHTS]
    if quantization == "int8":
        for linear in found:
            linear.pack_int8()
    elif not deterministic:
        for linear in found:
            if supports_packed_f32(linear.weight):
                linear.pack_f32()
        _pack_onednn([linear for linear in found if linear.packed is None])
    if deterministic:
        _pack_batch_invariant(model)


def _pack_onednn(found: list[Linear]) -> None:
    own = [linear for linear in found if supports_onednn(linear.weight)]
    if own and sum(linear.weight.nbytes for linear in own) <= MEMORY_FRACTION * _available():
        for linear in own:
            linear.pack_onednn()


def _available() -> int:
    import psutil  # imported here because GPU-only installations may lack it, see docs/gpu.md

    return int(psutil.virtual_memory().available)


def _pack_batch_invariant(model: Any) -> None:
    for module in iter_modules(model):
        if isinstance(module, LatentAttention) or (
            isinstance(module, Linear) and module.packed is None
        ):
            module.pack_batch_invariant()


def linears(model: Any) -> Iterator[Linear]:
    """Yield every `Linear` in a tree of dataclasses, except MoE routers."""
    return (
        module for module in iter_modules(model, without="router") if isinstance(module, Linear)
    )


def iter_modules(module: Any, without: str = "") -> Iterator[Any]:
    """Yield every dataclass in a tree of dataclasses and tuples; skip fields named `without`."""
    if isinstance(module, tuple):
        for each in module:
            yield from iter_modules(each, without)
    elif dataclasses.is_dataclass(module):
        yield module
        for field in dataclasses.fields(module):
            if field.name != without:
                yield from iter_modules(getattr(module, field.name), without)
