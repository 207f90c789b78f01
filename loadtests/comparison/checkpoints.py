"""Creates the models of the comparison, and computes the FLOPs and weights that they need.

A model with random weights is created once, from a seed. It is cached together with the formats to
which other engines convert it.
"""

import hashlib
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock.loadtests.comparison.engines import REFERENCE
from penstock.loadtests.comparison.environments import python_of
from penstock.loadtests.micro.ab_runner import SHIPPED_MODEL

SHAPES = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 4096,
    },
    "150m": {
        "vocab_size": 32000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
    },
    "1b": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
    },
    "moe": {
        "vocab_size": 32000,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 4096,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
}
"""Configurations of the models with random weights.

150m: `llama-150m`; 1b: TinyLlama; moe: a small Mixtral; tiny: for a smoke test, with a head dim of
64 because vLLM does not support 16 on a CPU.
"""

MODELS = ("shipped", *SHAPES)
_DIRECTORY = Path(__file__).parent / "adapters"


class NoCheckpoint(RuntimeError):
    """Raised if the checkpoint could not be created. The message gives the reason."""


def checkpoint(model: str, cache: Path) -> Path:
    """Return the cached folder of a model of MODELS.

    The model is created first if it is not cached. Raises NoCheckpoint or NotInstalled.
    """
    folder = cache / "checkpoints" / f"{model}-{_mark(model)}"
    if folder.exists():
        return folder
    temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
    temporary.parent.mkdir(parents=True, exist_ok=True)
    try:
        if model == "shipped":
            shutil.copytree(
                SHIPPED_MODEL, temporary
            )  # a copy, because other engines write their converted files into the folder
        else:
            _make(model, temporary, cache)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _mark(model: str) -> str:
    """Return a hash of everything that determines the folder's content."""
    if model == "shipped":
        source = (SHIPPED_MODEL / "model.safetensors").read_bytes()
    else:
        source = repr((SHAPES[model], REFERENCE.requirements)).encode()
    return hashlib.sha256(source).hexdigest()[:12]


def _make(model: str, folder: Path, cache: Path) -> None:
    script = str(_DIRECTORY / "make_checkpoint.py")
    command = [str(python_of(REFERENCE, cache)), script, str(folder), json.dumps(SHAPES[model])]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise NoCheckpoint(f"creating model {model} failed: {done.stderr.strip()[-400:]}")


@dataclass(frozen=True, slots=True)
class Cost:
    """Numbers of weights and of attention FLOPs that a model needs, whatever the engine.

    Only the weights that a token uses are counted: in an MoE layer, those of the active experts.
    """

    body: int  # number of parameters of the layers that each token uses
    head: int  # number of parameters in the projection to the vocabulary
    attention: int  # FLOPs of attention for each pair of query token and context token

    @classmethod
    def of(cls, folder: Path) -> "Cost":
        """Compute the cost from the configuration and tensor shapes of a checkpoint folder."""
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        fraction = config.get("num_experts_per_tok", 1) / (config.get("num_local_experts") or 1)
        body = head = embedding = 0.0
        for name, size in _sizes(folder):
            if "embed_tokens" in name:
                embedding = size
            elif "lm_head" in name:
                head = size
            else:
                body += size * fraction if ".experts." in name else size
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        attention = 4 * config["num_hidden_layers"] * heads * head_dim
        return cls(int(body), int(head or embedding), attention)

    def prefill(self, length: int) -> float:
        """Return the FLOPs to compute the first answer token of one prompt of `length` tokens."""
        return 2 * (self.body * length + self.head) + self.attention * length * (length + 1) / 2

    def decode(self, length: int, count: int) -> float:
        """Return the FLOPs of `count` decode steps of a sequence with `length` prompt tokens."""
        looked_at = count * length + count * (count + 1) / 2
        return 2 * (self.body + self.head) * count + self.attention * looked_at

    @property
    def weights_a_token(self) -> int:
        """Number of weights that an engine reads to generate one token at batch size 1."""
        return self.body + self.head


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and the number of elements of each tensor, from the safetensors headers."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        for name, about in header.items():
            if name != "__metadata__":
                size = 1
                for extent in about["shape"]:
                    size *= extent
                yield name, size
