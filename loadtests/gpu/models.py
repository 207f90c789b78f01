"""Models of known shapes with random weights, created directly on the device."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock.workers.layers.packing import pack
from penstock.workers.models.decoder import Decoder, empty_decoder
from penstock.workers.models.spec import read_spec

WEIGHT_STD = 0.02
"""Standard deviation of the random weights."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model configuration and its description."""

    about: str
    config: dict[str, Any]  # content of the model's `config.json`


def _llama(hidden: int, inner: int, layers: int, heads: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": hidden // heads,
        "vocab_size": 128256,
        "tie_word_embeddings": tied,
        **_COMMON,
    }


_COMMON = {
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}

_MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "attention_bias": False,
    **_COMMON,
}

_SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256}

SHAPES = {
    "1b": Shape("Llama of 1.2B, tied", _llama(2048, 8192, 16, 32, tied=True)),
    "8b": Shape("Llama of 8.0B", _llama(4096, 14336, 32, 32, tied=False)),
    "moe": Shape("16 of the 48 layers of a 30B MoE, 128 experts, 8 per token", _MOE),
}


def small(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with only two narrow layers."""
    narrow = {
        **config,
        **_SMALL,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    if "num_experts" in config:
        narrow |= {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    return narrow


def random_model(
    folder: Path,
    config: dict[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    deterministic: bool = False,
) -> Decoder:
    """Write `config.json` into `folder`, and create the model with random weights."""
    (folder / "config.json").write_text(json.dumps(config))
    decoder = empty_decoder(read_spec(folder), dtype, device, deterministic)
    generator = torch.Generator(device).manual_seed(0)
    for tensor in decoder.tensors().values():
        if tensor.dim() == 1:
            tensor.fill_(1)
        else:
            tensor.normal_(0, WEIGHT_STD, generator=generator)
    if deterministic:
        pack(decoder, "none", deterministic)
    return decoder


def save_weights(folder: Path, decoder: Decoder) -> None:
    """Write the weights of a model beside its `config.json`."""
    tensors = {name: tensor.cpu().clone() for name, tensor in decoder.tensors().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
