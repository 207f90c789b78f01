"""The memory that keys and values live in."""

import math

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.triton_common.launch import runs_kernels


class KvCache:
    """Paged keys and values of all layers; block numbers are the scheduler's.

    `data`: [num_layers, sides, num_blocks, heads, block_size, features], zero at first, with the
    (sides, heads, features) of `kv_shape`.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_shape: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        sides, heads, features = kv_shape
        shape = (num_layers, sides, num_blocks, heads, block_size, features)
        self.data: Tensor = _zeros(shape, dtype, device)


def choose_cache_dtype(
    name: str, quantization: str, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """What keys and values are kept in, of a model that computes in `dtype`.

    name: "auto", "float32" or "bfloat16". "auto" is `dtype`; but bfloat16 with INT8 weights on a
    CPU, where reading the cache would take most of a step. ValueError where it cannot be had.
    """
    # Kernels read what they compute with, so far; torch's forms and numba's widen.
    narrows = dtype == torch.float32 and not runs_kernels(device)
    if name == "auto":
        return torch.bfloat16 if narrows and quantization == "int8" else dtype
    chosen: torch.dtype = getattr(torch, name)
    if chosen != dtype and not (narrows and chosen == torch.bfloat16):
        raise ValueError(
            f"kv_cache_dtype {name} cannot be had: the model computes in "
            f"{str(dtype).removeprefix('torch.')} on {device.type}, and a cache of another dtype "
            "is only read on a CPU, of bfloat16 where it computes in float32; use auto"
        )
    return chosen


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros come from the kernel: a page takes memory only once it is written. torch writes.
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
