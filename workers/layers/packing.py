"""Loaded weights in the forms that compute fastest."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from penstock.kernels.products import can_block, why_no_int8
from penstock.workers.layers.linear import Linear

LEAST_WEIGHTS = 1 << 14
"""Smaller products gain nothing."""

MEMORY_SHARE = 0.125
"""Of what is available: a second copy of the weights may take as much."""


def check_quantization(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """ValueError where products cannot be quantized as asked."""
    if name == "int8" and (reason := why_no_int8(device, dtype)):
        raise ValueError(f"quantization int8 cannot be had: {reason}")


def pack(model: Any, quantization: str) -> None:
    """Packs the products of a loaded model, in place.

    model: records of records and tuples, with every `Linear` somewhere in it. A mixture's router is
    left as it is: a token that goes to another expert is another token.
    """
    found = [linear for linear in linears(model) if linear.weight.numel() >= LEAST_WEIGHTS]
    if quantization == "int8":
        for linear in found:
            linear.quantize()
        return
    own = [linear for linear in found if can_block(linear.weight)]
    if own and sum(linear.weight.nbytes for linear in own) <= MEMORY_SHARE * _available():
        for linear in own:
            linear.block()


def _available() -> int:
    import psutil  # not where only GPUs compute, see docs/gpu.md

    return int(psutil.virtual_memory().available)


def linears(part: Any) -> Iterator[Linear]:
    """Every `Linear` in a tree of records, but for routers."""
    if isinstance(part, Linear):
        yield part
    elif isinstance(part, tuple):
        for each in part:
            yield from linears(each)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            if field.name != "router":
                yield from linears(getattr(part, field.name))
