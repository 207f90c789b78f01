"""Computes model fingerprints and layout strings.

Two workers can exchange KV blocks only if their layout strings are equal.
"""

from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import torch

from penstock.common.gguf.checkpoint import is_gguf, open_gguf
from penstock.kernels.cpu_common.cpu_features import has_amx, has_vnni
from penstock.kernels.kv_cache.format import KvCacheFormat
from penstock.workers.models.protocols import ModelInfo
from penstock.workers.parallel.mesh import Mesh
from penstock.workers.weights.loading import find_tensors

KV_TRANSFER_VERSION = 2  # increase it when the meaning of transferred blocks changes

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


def model_fingerprint(folder: Path) -> str:
    """Return a hash of a checkpoint's configuration, file headers and samples of the weights.

    The samples distinguish fine-tuned variants of a model without reading all weights. The header
    of a GGUF file, which contains the configuration, is hashed in full too.
    """
    digest = blake2b(digest_size=16)
    if is_gguf(folder):
        for part in open_gguf(folder).headers:
            _hash_weights(digest, part.path, 0, part.num_bytes)
        return digest.hexdigest()
    digest.update((folder / "config.json").read_bytes())
    for path in _weight_files(folder):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
        _hash_weights(digest, path, 8, 8 + length)
    return digest.hexdigest()


def _weight_files(folder: Path) -> Sequence[Path]:
    """Return the safetensors files that are read; there are none if a model was made in memory.

    The folder may contain others, for example Mistral's consolidated weights.
    """
    if not any(folder.glob("*.safetensors")):
        return ()
    return sorted({entry.path for entry in find_tensors(folder).values()})


def _hash_weights(digest: blake2b, path: Path, start: int, num_bytes: int) -> None:
    """Hash a file's name and size, bytes [start, start + num_bytes), and samples of the file."""
    size = path.stat().st_size
    digest.update(f"{path.name} {size}".encode())
    with path.open("rb") as file:
        file.seek(start)
        digest.update(file.read(num_bytes))
        for sample in range(_NUM_SAMPLES):
            file.seek(max(0, size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))


def layout_of(
    model: str,
    spec: ModelInfo,
    dtype: torch.dtype,
    form: KvCacheFormat,
    deterministic: str = "",
    linear_methods: str = "float",
) -> str:
    """Return the layout string of a worker's KV; only workers with equal strings exchange blocks.

    Workers with equal strings may differ in their number of ranks and in their block size. In
    deterministic mode, the mesh, the block size and the kind of device must be the same too: a
    worker may only continue from KV that is bitwise identical to its own.

    Args:
        model: Result of `model_fingerprint`.
        form: Format of the KV cache.
        deterministic: Result of `numerics_of` in deterministic mode, otherwise empty.
        linear_methods: Names of the linear methods of all weights; see `LinearMethod.name`.
    """
    shape = (spec.num_layers, *spec.kv_shape, spec.rope.divisors)
    described = f"{KV_TRANSFER_VERSION} {model} {dtype} {shape}"
    if deterministic:
        described += f" deterministic {deterministic}"
    if linear_methods != "float":
        described += f" weights {linear_methods}"
    digest = blake2b(described.encode(), digest_size=16).hexdigest()
    return f"{digest} {form.name}"


def numerics_of(block_size: int, device: torch.device, mesh: Mesh) -> str:
    """Return a description of all properties of a worker that affect the bits of its KV."""
    # Each rank computes a part of a sum, so the bits depend on the number of ranks.
    given = f"{block_size} {mesh}"
    if device.type == "cuda":
        return f"{given} {torch.cuda.get_device_name(device)}"
    integers = "AMX" if has_amx() else "VNNI" if has_vnni() else ""
    return f"{given} {torch.backends.cpu.get_cpu_capability()} {integers}"


def layout_mismatch(theirs: str, ours: str) -> str:
    """Return why workers with these layouts cannot exchange KV; empty if they can."""
    if theirs == ours:
        return ""
    of_them, _, their_format = theirs.partition(" ")
    of_us, _, our_format = ours.partition(" ")
    if of_them == of_us and their_format:
        return (
            f"the formats of the KV caches differ ({their_format} and {our_format}): use the same "
            "kv_cache_dtype for both workers"
        )
    return (
        "the layouts differ: use the same model, dtype and quantization for both workers, and in "
        "deterministic mode the same tp, pp, ep and block size and the same kind of GPU or CPU"
    )
