"""Tensors that a model loads from a checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.workers.weights.regions import Region

FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor. Each part is loaded into its own memory, which `data` returns."""

    region: Region
    data: Callable[[], Tensor]  # returns the contiguous tensor to be filled
    finish: Callable[[], None]  # called once `data` is filled


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor of a checkpoint, or a rank's region of it, and the memory into which it is loaded.

    The first call of `data` may allocate this memory.
    """

    owner: object  # the module that is packed once all of its parameters are loaded
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: Callable[[], Tensor]  # returns the contiguous tensor of `shape` to be filled
    accepts: tuple[str, ...] = FLOATS  # dtypes that the tensor may have in a safetensors file
    region: Region | None = None  # part of the file's tensor to load; None: see `sharding.regions`
    # other shapes that the same items may have in the file
    alternatives: tuple[tuple[int, ...], ...] = ()
    pieces: tuple[Piece, ...] = ()  # if set, loaded one after another; `data` is unused

    @property
    def num_items(self) -> int:
        return torch.Size(self.shape).numel()


def parameter(owner: object, tensor: Tensor) -> Parameter:
    """Return the parameter for a tensor whose memory is allocated already."""
    return Parameter(owner, tuple(tensor.shape), tensor.dtype, lambda: tensor)
