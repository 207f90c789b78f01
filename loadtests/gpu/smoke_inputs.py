"""Random inputs of smoke cases."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

Result: TypeAlias = tuple[Tensor, Tensor]  # the result of a kernel and the exact result
Case: TypeAlias = tuple[str, Callable[[], Result]]
Ints: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.int32]]"

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Inputs:
    """Makes random inputs of one dtype on the device. Every run makes the same inputs."""

    device: torch.device
    dtype: torch.dtype
    small: bool  # whether to use few and short sequences, for Triton's interpreter

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
        return (values * scale).to(self.device, self.dtype)

    def batch(self, lengths: list[tuple[int, int]]) -> tuple[tuple[Ints, Ints, Ints], int]:
        """Return query starts, context lengths, block tables and the number of blocks.

        `lengths` has the number of query tokens and the context length of each sequence.
        """
        contexts = np.array([context for _, context in lengths], np.int32)
        starts = np.cumsum([0, *(query for query, _ in lengths)]).astype(np.int32)
        width = -(-int(contexts.max()) // BLOCK_SIZE)
        num_blocks = width * len(lengths)
        tables = np.random.default_rng(len(lengths)).permutation(num_blocks).astype(np.int32)
        return (starts, contexts, tables.reshape(len(lengths), width)), num_blocks


def wide(tensor: Tensor) -> Tensor:
    """Copy a tensor to the host and convert it to float64."""
    return tensor.cpu().double()
