"""The bytes that a decode step has to read: weights once, and the keys and values of its rows."""

import torch

from penstock.workers.models.decoder import empty_decoder
from penstock.workers.models.spec import ModelSpec

_EXPERTS = ".experts."


def expected_fraction(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Of the experts, how many some token goes to, if each goes anywhere as likely."""
    return 1 - (1 - top_k / num_experts) ** num_tokens


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, batch: int) -> float:
    """Of a step with one token each of so many sequences.

    Of the embeddings only the tokens' rows are read, but all where they are the head too. Of a
    mixture's experts those that are expected to be chosen are.
    """
    total = 0.0
    for name, tensor in empty_decoder(spec, dtype, torch.device("meta")).tensors().items():
        if name == f"{spec.names.embeddings}.weight" and not spec.tie_embeddings:
            total += batch * tensor[0].nbytes
        elif spec.experts is not None and _EXPERTS in name:
            fraction = expected_fraction(spec.experts.num_experts, spec.experts.top_k, batch)
            total += fraction * tensor.nbytes
        else:
            total += tensor.nbytes
    return total


def step_bytes(spec: ModelSpec, dtype: torch.dtype, batch: int, context: float) -> float:
    """With a mean context of so many positions a sequence."""
    kv = batch * context * spec.kv_bytes_per_token(dtype.itemsize)
    return weight_bytes(spec, dtype, batch) + kv
