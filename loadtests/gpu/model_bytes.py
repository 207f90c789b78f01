"""Number of bytes that a decode step must read: all weights and the sequences' KV cache."""

import torch

from penstock.kernels.kv_cache.format import format_of
from penstock.workers.models.decoder import empty_decoder
from penstock.workers.models.spec import ModelSpec

_EXPERTS = ".experts."


def expected_fraction(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Return the expected fraction of experts that a batch uses if routing is uniformly random."""
    return 1 - (1 - top_k / num_experts) ** num_tokens


def weight_bytes(spec: ModelSpec, dtype: torch.dtype, batch: int) -> float:
    """Return the weight bytes read by a step with one token of each of `batch` sequences.

    The embeddings count with one row per token, or with all rows if they are tied to the head. The
    experts count with the fraction that the batch is expected to use.
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
    """Return the bytes read by a decode step with `context` positions per sequence on average."""
    token_bytes = spec.num_layers * format_of(dtype).token_bytes(spec.kv_shape)
    kv = batch * context * token_bytes
    return weight_bytes(spec, dtype, batch) + kv
