"""The models that engines are compared with: random ones of known shapes, and what they cost.

A random model is made once, from a seed, and kept in the cache beside what peers export of it.
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
"""150m: `llama-150m`; 1b: TinyLlama's; moe: a small Mixtral; tiny: to see that everything runs (its
heads are of 64, since vLLM computes none of 16 on a CPU)."""

MODELS = ("shipped", *SHAPES)
_DIRECTORY = Path(__file__).parent / "adapters"


class NoCheckpoint(RuntimeError):
    """The model could not be made; the message says why."""


def checkpoint(model: str, cache: Path) -> Path:
    """Return the folder of a model, made first where it is random and not there yet.

    `model` is one of MODELS. Raises NoCheckpoint or NotInstalled.
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
            )  # peers export into it: not into the installed one
        else:
            _make(model, temporary, cache)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _mark(model: str) -> str:
    """Changes with what the folder would hold."""
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
        raise NoCheckpoint(f"the model {model} could not be made: {done.stderr.strip()[-400:]}")


@dataclass(frozen=True, slots=True)
class Cost:
    """What arithmetic and memory a model asks for, whatever engine runs it.

    Counted from the weights that a token passes through; of the experts those that it is sent to.
    """

    body: int  # parameters of layers that each token is multiplied with
    head: int  # parameters of the projection to the vocabulary
    attention: int  # floating-point operations a token for each token that it looks at

    @classmethod
    def of(cls, folder: Path) -> "Cost":
        """Read it from a checkpoint folder."""
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
        """Floating-point operations of one prompt up to its first token."""
        return 2 * (self.body * length + self.head) + self.attention * length * (length + 1) / 2

    def decode(self, length: int, count: int) -> float:
        """Operations of `count` more tokens after a prompt of `length` and its first token."""
        looked_at = count * length + count * (count + 1) / 2
        return 2 * (self.body + self.head) * count + self.attention * looked_at

    @property
    def bytes_a_token(self) -> int:
        """Of fp32 weights read for one token at batch 1."""
        return 4 * (self.body + self.head)


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    """Names and numbers of elements of all tensors, from the headers of safetensors files."""
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
