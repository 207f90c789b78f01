"""Table of the model families that the native decoder serves.

`config.json` names a model family by its architecture. To add a family, add a row to `FAMILIES`. If
the family needs a new feature, add a field to `Family` and implement the feature in the decoder.
"""

from typing import Any

from penstock.workers.models.config import Config
from penstock.workers.models.families_legacy import LEGACY_FAMILIES
from penstock.workers.models.family import (
    ExpertConfigKeys,
    Family,
    always,
    if_configured,
    if_not_denied,
)
from penstock.workers.models.sliding_window import (
    alternate_lower_layers,
    alternating,
    every_layer,
    every_layer_if_used,
    upper_layers,
)
from penstock.workers.models.tensor_names import TensorNames


def _after_the_first(config: Config) -> list[bool]:
    first = config.get("first_k_dense_replace") or 0
    return [layer >= first for layer in range(config["num_hidden_layers"])]


GEMMA: dict[str, Any] = {
    "qkv_bias": if_configured,
    "output_bias": if_configured,
    "head_dim": 256,
    "norm_kind": "rms_above_one",
    "norm_position": "both",
    "activation": "gelu_pytorch_tanh",
    "activation_key": "hidden_activation",
    "scaled_embeddings": True,
    "soft_caps": True,
    "names": TensorNames(
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
}
GEMMA_ABSENT: dict[str, Any] = {"tie_word_embeddings": True, "sliding_window": 4096}

GPT_OSS_ROPE: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}

DEEPSEEK: dict[str, Any] = {
    "qkv_bias": if_configured,
    "output_bias": if_configured,
    "latent": True,
    "names": TensorNames(qkv=("self_attn.q_proj",), shared="shared_experts"),
}
DEEPSEEK_EXPERTS: dict[str, Any] = {
    "inner_size": "moe_intermediate_size",
    "layers": _after_the_first,
    "shared_count": "n_shared_experts",
}
DEEPSEEK_ABSENT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama", qkv_bias=if_configured, output_bias=if_configured, mlp_bias=True
    ),
    "MistralForCausalLM": Family("mistral", windows=every_layer, absent={"sliding_window": 4096}),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=always, windows=upper_layers),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        qkv_bias=if_configured,
        output_bias=if_configured,
        qk_norm="head",
        windows=upper_layers,
        head_dim=128,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3-moe",
        qkv_bias=if_configured,
        output_bias=if_configured,
        qk_norm="head",
        windows=every_layer_if_used,
        experts=ExpertConfigKeys("moe_intermediate_size"),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2-moe",
        qkv_bias=if_not_denied,
        windows=alternate_lower_layers,
        experts=ExpertConfigKeys(
            "moe_intermediate_size", shared_size="shared_expert_intermediate_size"
        ),
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        qkv_bias=if_configured,
        output_bias=if_configured,
        qk_norm="whole",
        norm_position="after",
        absent={"rms_norm_eps": 1e-5},
        names=TensorNames(
            attention_post_norm="post_attention_layernorm",
            mlp_post_norm="post_feedforward_layernorm",
        ),
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        windows=every_layer,
        partial_rotary=True,
        absent={"rms_norm_eps": 1e-5},
        names=TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("gate_up_proj",)),
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        windows=alternating(2),
        absent=GEMMA_ABSENT | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        **GEMMA,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        qk_norm="head",
        windows=alternating(6),
        local_theta=10000.0,
        absent=GEMMA_ABSENT | {"rope_theta": 1e6},
        **GEMMA,
    ),
    "GptOssForCausalLM": Family(
        "gpt-oss",
        qkv_bias=if_configured,
        output_bias=if_configured,
        windows=alternating(2),
        head_dim=64,
        experts=ExpertConfigKeys("intermediate_size", normalise=True, clamped=True),
        sinks=True,
        absent={
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_parameters": GPT_OSS_ROPE,
            "rope_theta": 150000.0,
            "sliding_window": 128,
        },
        names=TensorNames(router="router"),
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek-v2",
        experts=ExpertConfigKeys(
            normalise=False,  # transformers ignores `norm_topk_prob` for this family
            methods=("greedy", "group_limited_greedy"),
            **DEEPSEEK_EXPERTS,
        ),
        absent=DEEPSEEK_ABSENT | {"n_shared_experts": 2},
        **DEEPSEEK,
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek-v3",
        experts=ExpertConfigKeys(methods=("noaux_tc",), **DEEPSEEK_EXPERTS),
        absent=DEEPSEEK_ABSENT
        | {
            "first_k_dense_replace": 3,
            "n_group": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
        },
        **DEEPSEEK,
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        windows=every_layer,
        experts=ExpertConfigKeys("intermediate_size", normalise=True),
        absent={"rms_norm_eps": 1e-5, "rope_theta": 1e6},
        names=TensorNames(
            experts="block_sparse_moe", expert_gate_up=("w1", "w3"), expert_down="w2"
        ),
    ),
    **LEGACY_FAMILIES,
}
"""Model families by architecture name in `config.json`."""

ARCHITECTURE_ALIASES = {
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "MPTForCausalLM": "MptForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
}
"""Names of architectures in published checkpoints, and the name in `transformers` of each."""
