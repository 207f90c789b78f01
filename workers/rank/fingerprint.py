"""What makes two workers' blocks mean the same: short strings that are equal only then."""

from hashlib import blake2b
from pathlib import Path

import torch

from penstock.workers.models.protocols import ModelInfo

KV_TRANSFER_VERSION = 2  # raised when what travels between workers changes its meaning

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def model_fingerprint(folder: Path) -> str:
    """Of a checkpoint: its configuration, its files' headers, and samples of their weights.

    The samples tell a model from its fine-tuned siblings without reading all of it.
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
    """Of the KV of a worker with that model, kept as `cached`: it travels only where this is the
    same.

    Ranks and block sizes may differ. What a deterministic worker goes on from must have been
    computed as it would have done, in blocks of its size too, which is `deterministic`.
    """
    shape = (spec.num_layers, *spec.kv_shape, spec.rope.divisors)
    described = f"{KV_TRANSFER_VERSION} {model} {dtype} {shape}"
    if deterministic is not None:
        described += f" deterministic {deterministic}"
    digest = blake2b(described.encode(), digest_size=16).hexdigest()
    return f"{digest} {str(cached).removeprefix('torch.')}"


def layout_mismatch(theirs: str, ours: str) -> str:
    """Why KV does not travel between two layouts; empty where it does."""
    if theirs == ours:
        return ""
    of_them, _, their_dtype = theirs.partition(" ")
    of_us, _, our_dtype = ours.partition(" ")
    if of_them == of_us and their_dtype:
        return (
            f"its KV cache is of {their_dtype}, ours of {our_dtype}: give both one kv_cache_dtype"
        )
    return "the layouts differ: another model or dtype"
