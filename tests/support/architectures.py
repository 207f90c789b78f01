"""Small checkpoints with random weights for every causal language model of `transformers`.

Configurations are shrunk through field names that most of them share (`SMALL`); `SPECIAL` holds
further settings by `model_type`.
"""

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.checkpoints import VOCAB_SIZE

ARCHITECTURES: dict[str, str] = {
    kind: name if isinstance(name, str) else name[0]
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
}
"""Architecture of each `model_type`; if `transformers` lists several architectures, the first
one."""

NUM_LAYERS = 3
WINDOW = 13

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 192,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "head_dim": 14,
    "sliding_window": WINDOW,
    # Mixtures of experts have these settings.
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 26,
    "shared_expert_intermediate_size": 34,
    "shared_intermediate_size": 34,
    "first_k_dense_replace": 1,
    # Multi-head latent attention (MLA) has these settings.
    "q_lora_rank": 26,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    # Text encoders that are used as decoders have these settings.
    "is_decoder": True,
    "type_vocab_size": 2,
    "embedding_size": 20,
    # Decoders of encoder-decoder models have these settings.
    "encoder_layers": 1,
    "decoder_layers": NUM_LAYERS,
    "encoder_ffn_dim": 36,
    "decoder_ffn_dim": 72,
    "ffn_dim": 72,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}

GEMMA4: dict[str, Any] = {
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "global_head_dim": 20,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 1,
    "pad_token_id": 0,
}
ROBERTAS = (
    *("roberta", "camembert", "data2vec-text", "xlm-roberta", "xlm-roberta-xl", "xmod"),
    "roberta-prelayernorm",
)
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": {"n_shared_experts": 2},
    "ctrl": {"dff": 72},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 500.0, "clip_qkv": 1.5},
        "ffn_config": {
            "hidden_size": 48,
            "ffn_hidden_size": 26,
            "moe_num_experts": 5,
            "moe_top_k": 2,
        },
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "dots1": {"n_shared_experts": 2},
    "emu3": {"text_config": {"pad_token_id": 2}},
    "gemma4": {"text_config": GEMMA4},
    "gemma4_assistant": {
        "text_config": GEMMA4
        | {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "num_kv_shared_layers": NUM_LAYERS,
        }
    },
    "gemma4_text": GEMMA4,
    "gemma4_unified": {"text_config": GEMMA4},
    "gemma4_unified_assistant": {"text_config": GEMMA4 | {"model_type": "gemma4_unified_text"}},
    "gemma4_unified_text": GEMMA4,
    "gemma3n_text": {
        "hidden_size_per_layer_input": 10,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "num_kv_shared_layers": 1,
        "laurel_rank": 8,
    },
    "granite": {
        "attention_multiplier": 0.4,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.7,
        "logits_scaling": 3.0,
    },
    "granitemoehybrid": {"layer_types": ["attention"] * NUM_LAYERS, "mamba_n_heads": 8},
    "helium": {"head_dim": 12},
    "laguna": {
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_attention_heads_per_layer": [4, 6, 4],
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "llama4_text": {"attention_chunk_size": 24},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]
    },
    "mimo_v2_flash": {
        "num_key_value_heads": 1,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 10,
        "swa_v_head_dim": 14,
    },
    "modernbert-decoder": {"pad_token_id": 2, "local_attention": 26},
    "olmo": {"clip_qkv": 1.5},
    "opt": {"pad_token_id": 1, "word_embed_proj_dim": 32},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "vaultgemma": {"attn_logit_softcapping": 2.5},
    "roc_bert": {"shape_vocab_size": 50, "pronunciation_vocab_size": 30},
    **{kind: {"pad_token_id": 1} for kind in ROBERTAS},
    "xmod": {"pad_token_id": 1, "default_language": "en_XX"},
}
"""Further settings by `model_type`. Some are required; others let the tests cover more code."""


def is_reviewed(kind: str) -> bool:
    """Return True if the transformers backend should support models of type `kind`.

    The model's class must support attention backends and keep no state except the KV cache.
    """
    found = getattr(transformers, ARCHITECTURES[kind])
    # The hybrid models of these tests have attention layers only.
    hybrid = kind == "granitemoehybrid"
    stateful = found._is_stateful and not hybrid
    return bool(found._supports_attention_backend and not stateful and kind not in NOT_CONSTRUCTED)


NOT_CONSTRUCTED = ("gemma3n", "gemma4_assistant")
"""Models that `transformers` cannot create here.

`gemma3n` needs packages for its vision part that are not installed. `gemma4_assistant` must share
all its layers, which its own layer classes refuse.
"""

KINDS: dict[str, str] = {name: kind for kind, name in ARCHITECTURES.items()}
"""`model_type` of each architecture. If several model types have the same architecture, the last
one, that of the text part, is used."""


def small_config(kind: str) -> Any:
    """Return a small configuration whose `model_type` is `kind`."""
    return _shrunk(transformers.CONFIG_MAPPING[kind], SPECIAL.get(kind, {}))


def _shrunk(kind: Any, special: dict[str, Any]) -> Any:
    fields = {*kind.__dataclass_fields__, *kind.attribute_map}
    usual = _usual(kind)
    own = {kind.attribute_map.get(name, name): value for name, value in SMALL.items()}
    values = {name: value for name, value in own.items() if name in fields}
    # In MLA, there are as many KV heads as query heads, and RoPE rotates a part of each head.
    if "kv_lora_rank" in fields:
        values |= {"num_key_value_heads": 4}
        values |= {"head_dim": 6} if "head_dim" in fields else {}
    for name in ("layer_types", "mlp_layer_types"):
        kinds = sorted(set(getattr(usual, name, None) or ()))
        if kinds:
            values[name] = [kinds[layer % len(kinds)] for layer in range(NUM_LAYERS)]
    for name, part in _parts(kind, usual, special).items():
        values[name] = _shrunk(part, special.get(name, {}))
    return kind(**{**special, **values, **_plain(special)})


def _plain(special: dict[str, Any]) -> dict[str, Any]:
    whole = {name: value for name, value in special.items() if not isinstance(value, dict)}
    return {name: whole[name] for name in whole if name != "model_type"}


def _parts(kind: Any, usual: Any, special: dict[str, Any]) -> dict[str, Any]:
    """Return the classes of a configuration's sub-configurations, by name."""
    found = {}
    for name in kind.sub_configs:
        own = getattr(usual, name, None)
        if isinstance(own, transformers.PreTrainedConfig):
            found[name] = type(own)
        elif "model_type" in special.get(name, {}):
            found[name] = transformers.CONFIG_MAPPING[special[name]["model_type"]]
    return found


def _usual(kind: Any) -> Any:
    try:
        return kind()
    except Exception:  # a few classes refuse their own default values
        return kind.__new__(kind)


def make_model(kind: str, seed: int = 0) -> Any:
    """Return a float32 model with random weights; biases and norm weights are random too."""
    torch.manual_seed(seed)
    kinds = {"dtype": torch.float32, "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(small_config(kind), **kinds).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            owner = ("." + name).split(".")[-2].lower()
            norm = "norm" in owner or owner.startswith("ln_")
            around = 1.0 if norm and name.endswith("weight") else 0.0
            parameter.normal_(around, 0.1 if norm else 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.25)
    return model


def make_checkpoint(folder: Path, kind: str, seed: int = 0) -> Any:
    model = make_model(kind, seed)
    model.save_pretrained(folder)
    return model


def write_unconstructed(folder: Path, kind: str) -> None:
    """Write a checkpoint with one dummy weight, for tests that read only the configuration."""
    config = small_config(kind) if kind in NOT_CONSTRUCTED else transformers.CONFIG_MAPPING[kind]()
    config.architectures = [ARCHITECTURES[kind]]
    config.save_pretrained(folder)
    save_file({"none": torch.zeros(1)}, folder / "model.safetensors", {"format": "pt"})
