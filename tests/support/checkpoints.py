"""Small checkpoints with random weights and unusual shapes, for each model family."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 307  # no tile size divides this prime
SPECIAL_TOKENS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "the water runs down the pipe to the wheel and the wheel turns in the stream",
    "a gate above lets in as much of the river as the turbine below can take",
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 192,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}

OLDER = {
    key: COMMON[key] for key in COMMON if key not in ("intermediate_size", "num_key_value_heads")
}

MPT = {
    **{key: COMMON[key] for key in COMMON if key.endswith("_id") or key == "vocab_size"},
    "d_model": 40,
    "n_heads": 4,
    "n_layers": 2,
    "max_seq_len": 192,
}


def heads(number: int) -> dict[str, int]:
    return {"num_attention_heads": number}


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 48,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 300.0,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.2, 2.0, 4.0, 9.0],
}

DEEPSEEK = {
    **{key: value for key, value in COMMON.items() if "heads" not in key},
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 22,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    # In Llama 2, there are as many KV heads as query heads.
    "llama2": lambda: transformers.LlamaConfig(**COMMON | {"num_key_value_heads": 4}),
    "llama3": lambda: transformers.LlamaConfig(
        **COMMON | {"head_dim": 20, "rope_parameters": LLAMA3_ROPE, "attention_bias": True}
    ),
    "llama32": lambda: transformers.LlamaConfig(
        **COMMON | {"tie_word_embeddings": True, "num_key_value_heads": 1, "mlp_bias": True}
    ),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=13, head_dim=8),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **COMMON | {"num_hidden_layers": 3},
        use_sliding_window=True,
        sliding_window=21,
        max_window_layers=1,
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **COMMON | {"num_hidden_layers": 3},
        head_dim=14,
        num_experts=7,
        num_experts_per_tok=3,
        moe_intermediate_size=22,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen2-moe": lambda: transformers.Qwen2MoeConfig(
        **COMMON | {"num_hidden_layers": 3},
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=26,
        shared_expert_intermediate_size=34,
        decoder_sparse_step=2,
        use_sliding_window=True,
        sliding_window=19,
        max_window_layers=2,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **COMMON, num_local_experts=5, num_experts_per_tok=2, sliding_window=17
    ),
    "olmo2": lambda: transformers.Olmo2Config(
        **COMMON | {"num_attention_heads": 6}, rope_parameters=YARN_ROPE
    ),
    "phi3": lambda: transformers.Phi3Config(
        **COMMON | {"num_attention_heads": 6, "num_key_value_heads": 3}, sliding_window=30
    ),
    "phi3-short": lambda: transformers.Phi3Config(
        **COMMON,
        original_max_position_embeddings=192,
        rope_parameters=LONG_ROPE | {"partial_rotary_factor": 0.67},
    ),
    "phi3-long": lambda: transformers.Phi3Config(
        **COMMON,
        original_max_position_embeddings=3,
        rope_parameters=LONG_ROPE | {"partial_rotary_factor": 0.67},
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **COMMON | {"num_hidden_layers": 3},
        head_dim=14,
        sliding_window=19,
        query_pre_attn_scalar=30,
        attn_logit_softcapping=2.5,
        final_logit_softcapping=5.0,
        tie_word_embeddings=False,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **COMMON | {"num_hidden_layers": 3},
        head_dim=14,
        sliding_window=19,
        query_pre_attn_scalar=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 900.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **COMMON | {"num_hidden_layers": 3},
        head_dim=14,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=19,
        swiglu_limit=1.5,
        rope_parameters=YARN_ROPE | {"truncate": False},
    ),
    # Falcon 7B has one KV head, and one norm per layer.
    "falcon-7b": lambda: transformers.FalconConfig(**OLDER, multi_query=True),
    # Falcon 40B has several KV heads, and two norms per layer.
    "falcon-40b": lambda: transformers.FalconConfig(
        **OLDER | {"num_attention_heads": 6},
        new_decoder_architecture=True,
        num_kv_heads=3,
        bias=True,
        ffn_hidden_size=76,
        tie_word_embeddings=False,
    ),
    "falcon-11b": lambda: transformers.FalconConfig(
        **OLDER, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "falcon-in-turn": lambda: transformers.FalconConfig(
        **OLDER, multi_query=False, parallel_attn=False, bias=True
    ),
    # Falcon RW rounds ALiBi biases to bfloat16, which cannot represent these slopes exactly.
    "falcon-rw": lambda: transformers.FalconConfig(
        **OLDER | {"hidden_size": 72, **heads(12)},
        alibi=True,
        multi_query=False,
        parallel_attn=False,
        bias=True,
    ),
    "falcon-rw-parallel": lambda: transformers.FalconConfig(
        **OLDER, alibi=True, multi_query=False, tie_word_embeddings=False
    ),
    # BLOOM and MPT get head counts that are not powers of two, and odd head sizes.
    "bloom": lambda: transformers.BloomConfig(**OLDER | {"hidden_size": 60, **heads(12)}),
    "bloom-untied": lambda: transformers.BloomConfig(
        **OLDER | heads(4), tie_word_embeddings=False, layer_norm_epsilon=0.02
    ),
    "mpt": lambda: transformers.MptConfig(**MPT | {"d_model": 54, "n_heads": 6}),
    "mpt-clipped": lambda: transformers.MptConfig(
        **MPT, attn_config={"clip_qkv": 1.5, "softmax_scale": 0.3}, layer_norm_epsilon=0.02
    ),
    "gpt-j": lambda: transformers.GPTJConfig(
        vocab_size=VOCAB_SIZE,
        n_embd=52,
        n_head=2,
        n_layer=2,
        n_positions=192,
        n_inner=70,
        rotary_dim=6,
        eos_token_id=1,
    ),
    # Like DeepSeek V2-Lite, this model has no query compression and no expert groups.
    "deepseek-v2-lite": lambda: transformers.DeepseekV2Config(
        **DEEPSEEK,
        num_attention_heads=2,
        q_lora_rank=None,
        n_routed_experts=5,
        rope_parameters=YARN_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.4},
    ),
    "deepseek-v2": lambda: transformers.DeepseekV2Config(
        **DEEPSEEK,
        num_attention_heads=6,
        q_lora_rank=18,
        n_routed_experts=12,
        n_group=4,
        topk_group=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=3.0,
        attention_bias=True,
        rms_norm_eps=0.03,
    ),
    # This family includes DeepSeek V3 and R1.
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **DEEPSEEK,
        num_attention_heads=3,
        q_lora_rank=26,
        n_routed_experts=15,
        n_group=5,
        topk_group=3,
        rope_parameters=YARN_ROPE | {"mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "deepseek-v3-plain": lambda: transformers.DeepseekV3Config(
        **DEEPSEEK | {"v_head_dim": 26, "first_k_dense_replace": 0},
        num_attention_heads=3,
        q_lora_rank=None,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        norm_topk_prob=False,
        rope_interleave=False,
    ),
    "qwen3": lambda: transformers.Qwen3Config(
        **COMMON | {"num_attention_heads": 6, "num_key_value_heads": 3}, head_dim=24
    ),
}

OTHERS: dict[str, Callable[[], Any]] = {
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**OLDER, intermediate_size=72),
    "olmo": lambda: transformers.OlmoConfig(**COMMON, clip_qkv=1.5),
}
"""Architectures without an implementation of our own; `architectures` covers all of them."""


transformers.utils.logging.disable_progress_bar()


def make_model(family: str, seed: int = 0) -> Any:
    """Return a float32 transformers model; all its weights, biases and norms are random."""
    config = (FAMILIES | OTHERS)[family]()
    torch.manual_seed(seed)
    # The other implementation of experts, a grouped matrix product, rejects odd shapes.
    kinds = {"dtype": torch.float32, "experts_implementation": "eager"}
    model = transformers.AutoModelForCausalLM.from_config(config, **kinds).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Large weights make the next token depend on distant tokens, so that answers vary.
            norm = "norm" in name or ".ln_" in name
            around = 1.0 if norm and name.endswith("weight") else 0.0
            parameter.normal_(around, 0.1 if norm else 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.25)
    return model


def make_checkpoint(folder: Path, family: str = "llama2", seed: int = 0, **save: Any) -> Any:
    """Write a complete checkpoint folder with tokenizer and chat template; return the model.

    `save` holds arguments for `save_pretrained`; `max_shard_size="40KB"` gives several weight
    files.
    """
    model = make_model(family, seed)
    model.save_pretrained(folder, **save)
    make_tokenizer(folder)
    return model


def make_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE tokenizer of exactly `VOCAB_SIZE` tokens with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[1],
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(folder)
