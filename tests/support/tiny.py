"""A very small Llama checkpoint with random weights, made without transformers."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 199
EOS = 1
NUM_LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER = 3, 32, 4, 2, 8, 48

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "torch_dtype": "float32",
}


def tiny_checkpoint(folder: Path, seed: int = 0) -> Path:
    """Write the checkpoint and return its folder; another seed gives other weights."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        # Large weights make the next token depend on distant tokens, so that answers vary.
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {
        "model.embed_tokens.weight": weight(VOCAB_SIZE, HIDDEN),
        "model.norm.weight": 1 + weight(HIDDEN),
        "lm_head.weight": weight(VOCAB_SIZE, HIDDEN),
    }
    for layer in range(NUM_LAYERS):
        sizes = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj": (INNER, HIDDEN),
            "mlp.up_proj": (INNER, HIDDEN),
            "mlp.down_proj": (HIDDEN, INNER),
        }
        for name, shape in sizes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = weight(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = 1 + weight(HIDDEN)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
