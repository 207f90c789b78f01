"""Comparison of a stored LM head with the embeddings to which the configuration ties it."""

from collections.abc import Mapping
from contextlib import ExitStack

import torch
from torch import Tensor

from penstock.workers.models.spec import ModelSpec
from penstock.workers.weights.safetensors import CHUNK_BYTES, DTYPES
from penstock.workers.weights.tensor_entry import TensorEntry


def has_untied_head(spec: ModelSpec, entries: Mapping[str, TensorEntry]) -> bool:
    """Return True if the model has tied embeddings, but the checkpoint has a different LM head.

    The tensors are compared as a whole, so that all ranks get the same result. They are read only
    if both exist, which is rare in checkpoints with tied embeddings.
    """
    names = (f"{spec.names.embeddings}.weight", f"{spec.names.head}.weight")
    if not spec.tie_embeddings or not all(name in entries for name in names):
        return False
    embeddings, head = (entries[name] for name in names)
    comparable = head.shape == embeddings.shape and len(head.shape) == 2
    if not comparable or not {head.dtype, embeddings.dtype} <= DTYPES.keys():
        return True
    return not _are_equal(embeddings, head)


def _are_equal(one: TensorEntry, other: TensorEntry) -> bool:
    """Compare two matrices of floats of the same shape, a few rows at a time."""
    num_rows, num_columns = one.shape
    step = max(1, CHUNK_BYTES // max(1, num_columns * torch.float32.itemsize))
    with ExitStack() as stack:
        files = [stack.enter_context(each.path.open("rb")) for each in (one, other)]

        def rows(number: int, entry: TensorEntry, first: int, last: int) -> Tensor:
            values = torch.empty((last - first, num_columns), dtype=torch.float32)
            entry.load(values, files[number], lambda num_bytes: None, (((first, last),),))
            return values

        for first in range(0, num_rows, step):
            last = min(first + step, num_rows)
            pair = (rows(number, each, first, last) for number, each in enumerate((one, other)))
            if not torch.equal(*pair):
                return False
    return True
