"""Ragged batches whose sequences have scattered KV blocks."""

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int32]
Batch = tuple[Ints, Ints, Ints]


def make_batch(lengths: list[tuple[int, int]], block_size: int, seed: int) -> tuple[Batch, int]:
    """Return a batch over scattered blocks, and the number of blocks.

    `lengths` holds (query tokens, context length) per sequence.
    """
    contexts = np.array([context for _, context in lengths], np.int32)
    starts = np.cumsum([0, *(query for query, _ in lengths)]).astype(np.int32)
    width = -(-int(contexts.max()) // block_size)
    num_blocks = width * len(lengths) + 2
    order = np.random.default_rng(seed).permutation(num_blocks)[: width * len(lengths)]
    tables = order.reshape(len(lengths), width).astype(np.int32)
    # Kernels must not use table entries past a sequence's blocks, so these entries are invalid.
    tables[np.arange(width) >= -(-contexts[:, None] // block_size)] = 10**6
    return (starts, contexts, tables), num_blocks


def poison(layer: torch.Tensor, batch: Batch) -> None:
    """Write NaN to every slot that holds no position of a sequence."""
    _, contexts, tables = batch
    block_size = layer.shape[3]
    used = torch.zeros(layer.shape[1], block_size, dtype=torch.bool)
    for context, table in zip(contexts.tolist(), tables, strict=True):
        at = np.arange(context)
        used[table[at // block_size], at % block_size] = True
    layer.masked_fill_(~used[None, :, None, :, None], torch.nan)
