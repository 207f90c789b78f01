"""The memory that keys and values live in."""

import torch
from torch import Tensor


class KvCache:
    """Paged keys and values of all layers; block numbers are the scheduler's.

    `data`: [num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim], zero at first.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, 2, num_blocks, num_kv_heads, block_size, head_dim)
        # On a CPU the pages of a zeroed tensor take memory only once they are written.
        self.data: Tensor = torch.zeros(shape, dtype=dtype, device=device)
