"""Describes a model's attention for the selection of an attention backend."""

import torch

from penstock.kernels.attention.backends.interface import AttentionRequest
from penstock.workers.gpu.graph_buckets import GraphBuckets
from penstock.workers.models.decoder import Decoder
from penstock.workers.models.protocols import Model


def attention_request(
    model: Model, cached: torch.dtype, block_size: int, max_sequences: int, deterministic: bool
) -> AttentionRequest:
    """Return the `AttentionRequest` of a rank's shard of a model.

    Args:
        cached: dtype of the KV cache.
        block_size: tokens per block.
        max_sequences: maximum number of sequences of a step.
    """
    spec, device = model.spec, model.device
    capability, multiprocessors = (0, 0), 0
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    _, num_kv_heads, features = spec.kv_shape
    native = model.spec if isinstance(model, Decoder) else None
    return AttentionRequest(
        device=device.type,
        capability=capability,
        multiprocessors=multiprocessors,
        dtype=_name(model.dtype),
        cached=_name(cached),
        num_heads=native.num_heads if native else num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=features,
        block_size=block_size,
        captured_rows=GraphBuckets(max_sequences, spec.max_model_len).rows[-1],
        windows=tuple(spec.windows),
        scale=native.attention_scale if native else None,
        cap=native.attention_cap if native else 0.0,
        has_sinks=bool(native and native.sinks),
        has_alibi=bool(native and native.alibi is not None),
        is_latent=spec.latent is not None,
        is_native=native is not None,
        deterministic=deterministic,
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
