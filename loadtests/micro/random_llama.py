"""Writes a Llama checkpoint with random weights, for speed measurements."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Llama model. The defaults give 125 million parameters."""

    hidden: int = 768
    inner: int = 2048
    layers: int = 12
    heads: int = 12
    kv_heads: int = 4
    vocab: int = 32000

    @property
    def block_weights(self) -> int:
        """Number of weights in the linear layers of all decoder layers."""
        head_dim = self.hidden // self.heads
        attention = self.hidden * head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.inner)

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden


def write_random_llama(folder: Path, shape: Shape = Shape(), seed: int = 0) -> Path:
    """Write a float32 checkpoint without a tokenizer and return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.ones(size) if len(size) == 1 else torch.randn(size, generator=generator) * 0.03
        for name, size in _sizes(shape).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(shape)))
    return folder


def _sizes(shape: Shape) -> dict[str, tuple[int, ...]]:
    hidden, inner = shape.hidden, shape.inner
    kv_size = hidden // shape.heads * shape.kv_heads
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    sizes = {
        f"model.layers.{number}.{name}.weight": size
        for number in range(shape.layers)
        for name, size in layer.items()
    }
    return sizes | {
        "model.embed_tokens.weight": (shape.vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (shape.vocab, hidden),
    }


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
