"""Writes and reads model folders in the layout of Hugging Face."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path

from safetensors.torch import load_file, save_file

from training.chat import BEGIN, END, PAD, SPECIAL_TOKENS
from training.model import Llama, LlamaShape

_IDS = {token: number for number, token in enumerate(SPECIAL_TOKENS)}


def save(model: Llama, folder: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors (fp32) of a model."""
    folder.mkdir(parents=True, exist_ok=True)
    ids: dict[str, object] = {
        "bos_token_id": _IDS[BEGIN],
        "eos_token_id": _IDS[END],
        "pad_token_id": _IDS[PAD],
    }
    _write(folder / "config.json", _config(model.shape) | ids)
    _write(folder / "generation_config.json", ids | {"do_sample": False})
    weights = {
        f"model.{name}": weight.detach().clone() for name, weight in model.named_parameters()
    }
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    # The rename is atomic, so a reader never sees a partial file.
    partial.chmod(0o644)
    partial.rename(folder / "model.safetensors")


def load(folder: Path) -> Llama:
    """Load the model from a folder that `save` has written."""
    config = json.loads((folder / "config.json").read_text())
    shape = LlamaShape(**{field.name: config[field.name] for field in fields(LlamaShape)})
    model = Llama(shape)
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): w for name, w in weights.items()})
    return model


def _config(shape: LlamaShape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **asdict(shape),
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "torch_dtype": "float32",
        "use_cache": True,
    }


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
