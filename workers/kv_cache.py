"""The memory that keys and values live in."""

import math

import numpy as np
import torch
from torch import Tensor


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


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros come from the kernel: a page takes memory only once it is written. torch writes.
    memory = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
