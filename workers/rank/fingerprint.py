"""Computes model fingerprints and layout strings.

Two workers can exchange KV blocks only if their layout strings are equal.
"""

from hashlib import blake2b
from pathlib import Path

import torch

from penstock.workers.models.protocols import ModelInfo

KV_TRANSFER_VERSION = 2  # increased when the meaning of transferred blocks changes

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def model_fingerprint(folder: Path) -> str:
    """Return a hash of a checkpoint's configuration, file headers and samples of the weights.

    The samples distinguish fine-tuned variants of a model without reading all weights.
    """
    digest = blake2b(digest_size=16)
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(8 + int.from_bytes(file.read(8), "little")))
            for sample in range(_NUM_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def layout_of(
    model: str,
    spec: ModelInfo,
    dtype: torch.dtype,
    cached: torch.dtype,
    deterministic: int | None = None,
) -> str:
    """Return the layout string of a worker's KV; only workers with equal strings exchange blocks.

    The workers may differ in their number of ranks and in their block size. In deterministic mode
    the block size must be the same: a worker may only continue from KV that was computed in the way
    in which it computes KV itself.

    Args:
        model: Result of `model_fingerprint`.
        cached: Dtype of the KV cache.
        deterministic: Block size of a worker in deterministic mode, otherwise None.
    """
    shape = (spec.num_layers, *spec.kv_shape, spec.rope.divisors)
    described = f"{KV_TRANSFER_VERSION} {model} {dtype} {shape}"
    if deterministic is not None:
        described += f" deterministic {deterministic}"
    digest = blake2b(described.encode(), digest_size=16).hexdigest()
    return f"{digest} {str(cached).removeprefix('torch.')}"


def layout_mismatch(theirs: str, ours: str) -> str:
    """Return why workers with these layouts cannot exchange KV; empty if they can."""
    if theirs == ours:
        return ""
    of_them, _, their_dtype = theirs.partition(" ")
    of_us, _, our_dtype = ours.partition(" ")
    if of_them == of_us and their_dtype:
        return f"its KV cache is of {their_dtype}, ours of {our_dtype}: use the same kv_cache_dtype"
    return "the layouts differ: use the same model and dtype for both workers"
