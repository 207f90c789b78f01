"""Model families whose `config.json` uses other keys than Llama's: Falcon, GPT-J, BLOOM, MPT."""

import math
from dataclasses import replace
from typing import Any

from penstock.workers.models.config import Config
from penstock.workers.models.family import Family, always, if_configured
from penstock.workers.models.tensor_names import TensorNames


def _renamed(config: Config, names: dict[str, str]) -> dict[str, Any]:
    """Return values of `config` under our keys. `names` maps each of our keys to a key of `config`.

    A value of null counts as absent.
    """
    found = {ours: config.get(theirs) for ours, theirs in names.items()}
    return {ours: value for ours, value in found.items() if value is not None}


def _four_times_as_wide(config: Config) -> dict[str, Any]:
    """Return the default `intermediate_size`, 4 * hidden_size, if the configuration has none."""
    hidden = config.get("hidden_size")
    if type(hidden) is not int or config.get("intermediate_size") is not None:
        return {}
    return {"intermediate_size": 4 * hidden}


def _usual_gpt_j(config: Config) -> dict[str, Any]:
    names = {
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    found = _renamed(config, names)
    heads, hidden = found.get("num_attention_heads", 0), found.get("hidden_size", 0)
    rotary_dim = config.get("rotary_dim", 64)
    sizes = (heads, hidden, rotary_dim)
    if all(type(size) is int and size > 0 for size in sizes) and hidden >= heads:
        # Round the fraction up, so that int(head_dim * fraction) is `rotary_dim` and not one less.
        found["partial_rotary_factor"] = math.nextafter(rotary_dim / (hidden // heads), math.inf)
    return found | _four_times_as_wide(found)


def _usual_falcon(config: Config) -> dict[str, Any]:
    found = _renamed(config, {"intermediate_size": "ffn_hidden_size"})
    found |= _renamed(config, {"rms_norm_eps": "layer_norm_epsilon"})
    found |= {"attention_bias": config.get("bias"), "mlp_bias": config.get("bias") or False}
    if config.get("new_decoder_architecture") or not config.get("multi_query", True):
        found |= _renamed(config, {"num_key_value_heads": "num_kv_heads"})
    else:
        found["num_key_value_heads"] = 1
    return found | _four_times_as_wide({**config, **found})


def _usual_bloom(config: Config) -> dict[str, Any]:
    names = {
        "hidden_size": "n_embed",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "seq_length",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    found = _renamed(config, names)
    return found | _four_times_as_wide({**config, **found})


def _usual_mpt(config: Config) -> dict[str, Any]:
    names = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "max_position_embeddings": "max_seq_len",
        "rms_norm_eps": "layer_norm_epsilon",
    }
    found, attention = _renamed(config, names), config.get("attn_config")
    if isinstance(attention, dict):
        keys = ("alibi_bias_max", "clip_qkv", "softmax_scale")
        found |= _renamed(attention, dict(zip(keys, keys, strict=True)))
    ratio, hidden = config.get("expansion_ratio", 4), found.get("hidden_size")
    if type(ratio) is int and type(hidden) is int:
        found["intermediate_size"] = ratio * hidden
    return found


def _falcon(config: Config) -> dict[str, Any]:
    """Return the fields of `Family` that depend on Falcon's variant.

    In the original architecture, attention and feed-forward are parallel with one norm, or
    sequential. In the new architecture, they are parallel with two norms, or with one norm if
    `num_ln_in_parallel_attn` is set to a number other than 2.
    """
    alibi = {"alibi": "rounded"} if config.get("alibi") else {}
    if not config.get("new_decoder_architecture"):
        parallel = bool(config.get("parallel_attn", True))
        return {"parallel": parallel, "norm_position": "once" if parallel else "before", **alibi}
    norms = config.get("num_ln_in_parallel_attn")
    if norms not in (None, 2):
        return {"norm_position": "once", **alibi}
    return {"names": replace(FALCON, attention_norm="ln_attn", mlp_norm="ln_mlp"), **alibi}


FALCON = TensorNames(
    embeddings="transformer.word_embeddings",
    norm="transformer.ln_f",
    layers="transformer.h",
    qkv=("self_attention.query_key_value",),
    output="self_attention.dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)

LEGACY_FAMILIES: dict[str, Family] = {
    "FalconForCausalLM": Family(
        "falcon",
        qkv_bias=if_configured,
        output_bias=if_configured,
        mlp_bias=True,
        parallel=True,
        qkv_grouped=True,
        gated=False,
        norm_kind="layer",
        activation="gelu",
        activation_key="activation",
        absent={
            "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
        },
        usual=_usual_falcon,
        variant=_falcon,
        names=FALCON,
    ),
    "GPTJForCausalLM": Family(
        "gpt-j",
        mlp_bias=True,
        norm_position="once",
        parallel=True,
        gated=False,
        head_bias=True,
        interleaved=True,
        norm_kind="layer",
        activation="gelu_new",
        activation_key="activation_function",
        partial_rotary=True,
        absent={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "mlp_bias": True},
        usual=_usual_gpt_j,
        names=TensorNames(
            embeddings="transformer.wte",
            norm="transformer.ln_f",
            layers="transformer.h",
            attention_norm="ln_1",
            qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
            output="attn.out_proj",
            gate_up=("fc_in",),
            down="fc_out",
        ),
    ),
    "BloomForCausalLM": Family(
        "bloom",
        qkv_bias=always,
        output_bias=always,
        mlp_bias=True,
        qkv_grouped=True,
        gated=False,
        norm_kind="layer",
        embedding_norm=True,
        alibi="exact",
        activation="gelu_new",
        absent={
            "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
            "mlp_bias": True,
            "rms_norm_eps": 1e-5,
        },
        refused=("apply_residual_connection_post_layernorm", "slow_but_exact"),
        usual=_usual_bloom,
        names=replace(
            FALCON,
            prefix="transformer.",
            embedding_norm="transformer.word_embeddings_layernorm",
        ),
    ),
    "MptForCausalLM": Family(
        "mpt",
        gated=False,
        norm_kind="layer_unbiased",
        alibi="exact",
        clips=True,
        activation="gelu",
        absent={
            "tie_word_embeddings": True,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
        },
        refused=("attn_config.qk_ln", "attn_config.prefix_lm", "logit_scale"),
        only={
            "attn_config.alibi": True,
            "attn_config.attn_type": "multihead_attention",
            "no_bias": True,
            "norm_type": "low_precision_layernorm",
        },
        usual=_usual_mpt,
        names=TensorNames(
            embeddings="transformer.wte",
            norm="transformer.norm_f",
            layers="transformer.blocks",
            attention_norm="norm_1",
            mlp_norm="norm_2",
            qkv=("attn.Wqkv",),
            output="attn.out_proj",
            mlp="ffn",
            gate_up=("up_proj",),
            down="down_proj",
        ),
    ),
}
"""Model families by architecture name in `config.json`."""
