"""Embeddings and logits with the vocabulary divided among ranks."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.workers.parallel.collectives import ProcessGroup


def vocab_parallel_embedding(
    tokens: Tensor, weight: Tensor, first: int, group: ProcessGroup
) -> Tensor:
    """Return the embeddings [T, D] of tokens [T].

    Args:
        tokens: [T] token ids.
        weight: [n, D] this rank's part: the embeddings of tokens `first` to `first + n - 1`.
        first: this rank's first token id.
        group: the ranks among which the vocabulary is divided.
    """
    rows = tokens - first
    elsewhere = (rows < 0) | (rows >= len(weight))
    if len(weight):
        embeddings = functional.embedding(rows.masked_fill(elsewhere, 0), weight)
        embeddings.masked_fill_(elsewhere[:, None], 0)
    else:
        embeddings = weight.new_zeros(len(tokens), weight.shape[1])
    return group.all_reduce(embeddings)


def gather_logits(logits: Tensor, vocab_size: int, group: ProcessGroup) -> Tensor:
    """Gather all ranks' parts of the logits into [S, V]; `MeshCoord.tokens` defines the parts."""
    size = -(-vocab_size // group.size)
    padded = functional.pad(logits, (0, size - logits.shape[1]))
    gathered = group.all_gather(padded)
    return torch.cat(gathered.unbind(0), dim=1)[:, :vocab_size].contiguous()
