"""Small random checkpoints with sizes that the compiled CPU step graphs support."""

from pathlib import Path
from typing import Any

import torch
import transformers

COMPATIBLE_SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 192,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def make_compatible(folder: Path, config: Any) -> Any:
    """Write a checkpoint with this transformers configuration and return the model."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # Change norms and biases too, which are 1 and 0 in a new model.
            if "norm" in name or name.endswith("bias"):
                weight.add_(0.2 * torch.randn_like(weight))
            else:
                weight.mul_(4)
    model.save_pretrained(folder)
    return model
