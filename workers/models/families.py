"""The families of models that are served: what sets each apart from the one decoder.

A family is named in `config.json` by its architecture. To add one, add a row (and, if it needs
what no family had, a field here and its meaning in the decoder).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.workers.models.config import Config
from penstock.workers.models.names import Names


def _no_window(config: Config) -> list[int]:
    return [0] * config["num_hidden_layers"]


def _every_layer(config: Config) -> list[int]:
    return [config.get("sliding_window") or 0] * config["num_hidden_layers"]


def _upper_layers(config: Config) -> list[int]:
    """The layers named in `layer_types` or, without that, from `max_window_layers` up."""
    num_layers = config["num_hidden_layers"]
    if not config.get("use_sliding_window"):
        return [0] * num_layers
    window = config.get("sliding_window", 4096) or 0
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        return [window if layer >= first else 0 for layer in range(num_layers)]
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _alternating(period: int) -> Callable[[Config], list[int]]:
    """The layers named in `layer_types` or, without that, all but every `period`th one."""

    def windows(config: Config) -> list[int]:
        window = config.get("sliding_window") or 0
        kinds = config.get("layer_types")
        if kinds is None:
            every = config.get("sliding_window_pattern", period)
            layers = range(1, config["num_hidden_layers"] + 1)
            return [window if layer % every else 0 for layer in layers]
        return [window if kind == "sliding_attention" else 0 for kind in kinds]

    return windows


def _every_layer_if_used(config: Config) -> list[int]:
    return _every_layer(config) if config.get("use_sliding_window") else _no_window(config)


def _alternate_lower_layers(config: Config) -> list[int]:
    """The layers named in `layer_types` or, without that, every other one of the lower layers."""
    if not config.get("use_sliding_window"):
        return _no_window(config)
    window = config.get("sliding_window", 4096) or 0
    kinds = config.get("layer_types")
    if kinds is None:
        last = config.get("max_window_layers", 28)
        layers = range(config["num_hidden_layers"])
        return [window if layer % 2 == 0 and layer < last else 0 for layer in layers]
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _if_configured(config: Config) -> bool:
    return bool(config.get("attention_bias", False))


def _if_not_denied(config: Config) -> bool:
    return bool(config.get("qkv_bias", True))


def _always(config: Config) -> bool:
    return True


def _never(config: Config) -> bool:
    return False


def _sparse_layers(config: Config) -> list[bool]:
    """Every `decoder_sparse_step`th layer that `mlp_only_layers` does not name."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    return [layer not in dense and (layer + 1) % step == 0 for layer in layers]


def _nothing(config: Config) -> dict[str, Any]:
    return {}


def _renamed(config: Config, names: dict[str, str]) -> dict[str, Any]:
    """What is there under their names, under ours. Null counts as absent."""
    found = {ours: config.get(theirs) for ours, theirs in names.items()}
    return {ours: value for ours, value in found.items() if value is not None}


def _four_times_as_wide(config: Config) -> dict[str, Any]:
    """The feed-forward layer, where the configuration is silent."""
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
    turned = config.get("rotary_dim", 64)
    sizes = (heads, hidden, turned)
    if all(type(size) is int and size > 0 for size in sizes) and hidden >= heads:
        # A step above, so that as many features as that are a whole number and not just below it.
        found["partial_rotary_factor"] = math.nextafter(turned / (hidden // heads), math.inf)
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


def _falcon(config: Config) -> dict[str, Any]:
    """The first decoder has one norm, or halves in turn; the new one two norms, or one if told."""
    if not config.get("new_decoder_architecture"):
        parallel = bool(config.get("parallel_attn", True))
        return {"parallel": parallel, "norm_place": "once" if parallel else "before"}
    norms = config.get("num_ln_in_parallel_attn")
    if norms not in (None, 2):
        return {"norm_place": "once"}
    return {"names": replace(FALCON, attention_norm="ln_attn", mlp_norm="ln_mlp")}


def _after_the_first(config: Config) -> list[bool]:
    first = config.get("first_k_dense_replace") or 0
    return [layer >= first for layer in range(config["num_hidden_layers"])]


@dataclass(frozen=True, slots=True)
class Experts:
    """Where a mixture of experts has its numbers in `config.json`."""

    inner_size: str
    normalise: bool | None = None  # None: as `norm_topk_prob` says
    shared_size: str | None = None
    layers: Callable[[Config], list[bool]] = _sparse_layers
    clamped: bool = False  # all in one tensor, with biases and a clamped gate: gpt-oss
    shared_count: str | None = None  # of shared experts as large as the others, without a gate
    methods: tuple[str, ...] = ()  # the values of `topk_method`, DeepSeek's, the usual one first


@dataclass(frozen=True, slots=True)
class Family:
    """How one family reads its `config.json`."""

    name: str
    qkv_bias: Callable[[Config], bool] = _never
    output_bias: Callable[[Config], bool] = _never  # of the attention's output projection
    mlp_bias: bool = False  # whether `mlp_bias` is looked at
    qk_norm: str = ""  # queries and keys are normalised: "head" by head, or "whole"
    norm_place: str = "before"  # attention and feed-forward, or "after" them, "both" or "once"
    parallel: bool = False  # attention and feed-forward read the same stream
    qkv_grouped: bool = False  # in the checkpoint: each KV head's query heads, key and value
    gated: bool = True  # the feed-forward layer
    head_bias: bool = False
    neighbours: bool = False  # rotary embedding turns pairs of neighbours
    windows: Callable[[Config], list[int]] = _no_window  # positions seen, a layer; 0: all
    head_dim: int | None = None  # where the configuration is silent; None: hidden / heads
    experts: Experts | None = None
    norm_kind: str = "rms"  # or "layer", or "rms_above_one": the weight counts from one
    activation: str = "silu"  # or "gelu_pytorch_tanh"; without a gate "gelu" or "gelu_new"
    activation_key: str = "hidden_act"  # in `config.json`
    scaled_embeddings: bool = False  # by the square root of their size
    sinks: bool = False  # each head has a score that takes probability and gives nothing
    soft_caps: bool = False  # and a scale of the scores that is configured
    local_theta: float | None = None  # of the layers with a window, if theirs is another
    absent: Config = field(default_factory=dict)  # what a key means that is not there
    partial_rotary: bool = False  # whether `partial_rotary_factor` is looked at
    refused: tuple[str, ...] = ()  # keys of what is not served
    usual: Callable[[Config], dict[str, Any]] = _nothing  # its configuration in Llama's keys
    variant: Callable[[Config], dict[str, Any]] = _nothing  # fields that it changes here
    latent: bool = False  # keys and values are cached compressed
    names: Names = field(default_factory=Names)


GEMMA: dict[str, Any] = {
    "qkv_bias": _if_configured,
    "output_bias": _if_configured,
    "head_dim": 256,
    "norm_kind": "rms_above_one",
    "norm_place": "both",
    "activation": "gelu_pytorch_tanh",
    "activation_key": "hidden_activation",
    "scaled_embeddings": True,
    "soft_caps": True,
    "names": Names(
        attention_post_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        mlp_post_norm="post_feedforward_layernorm",
    ),
}
GEMMA_ABSENT: dict[str, Any] = {"tie_word_embeddings": True, "sliding_window": 4096}

FALCON = Names(
    embeddings="transformer.word_embeddings",
    norm="transformer.ln_f",
    layers="transformer.h",
    qkv=("self_attention.query_key_value",),
    output="self_attention.dense",
    gate_up=("dense_h_to_4h",),
    down="dense_4h_to_h",
)

DEEPSEEK: dict[str, Any] = {
    "qkv_bias": _if_configured,
    "output_bias": _if_configured,
    "latent": True,
    "names": Names(qkv=("self_attn.q_proj",), shared="shared_experts"),
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
        "llama", qkv_bias=_if_configured, output_bias=_if_configured, mlp_bias=True
    ),
    "MistralForCausalLM": Family("mistral", windows=_every_layer),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=_always, windows=_upper_layers),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        qkv_bias=_if_configured,
        output_bias=_if_configured,
        qk_norm="head",
        windows=_upper_layers,
        head_dim=128,
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3-moe",
        qkv_bias=_if_configured,
        output_bias=_if_configured,
        qk_norm="head",
        windows=_every_layer_if_used,
        experts=Experts("moe_intermediate_size"),
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2-moe",
        qkv_bias=_if_not_denied,
        windows=_alternate_lower_layers,
        experts=Experts("moe_intermediate_size", shared_size="shared_expert_intermediate_size"),
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        qkv_bias=_if_configured,
        output_bias=_if_configured,
        qk_norm="whole",
        norm_place="after",
        names=Names(
            attention_post_norm="post_attention_layernorm",
            mlp_post_norm="post_feedforward_layernorm",
        ),
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        windows=_every_layer,
        partial_rotary=True,
        names=Names(qkv=("self_attn.qkv_proj",), gate_up=("gate_up_proj",)),
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        windows=_alternating(2),
        absent=GEMMA_ABSENT | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        **GEMMA,
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3",
        qk_norm="head",
        windows=_alternating(6),
        local_theta=10000.0,
        absent=GEMMA_ABSENT | {"rope_theta": 1e6},
        **GEMMA,
    ),
    "GptOssForCausalLM": Family(
        "gpt-oss",
        qkv_bias=_if_configured,
        output_bias=_if_configured,
        windows=_alternating(2),
        head_dim=64,
        experts=Experts("intermediate_size", normalise=True, clamped=True),
        sinks=True,
        absent={"attention_bias": True, "sliding_window": 128},
        names=Names(router="router"),
    ),
    "DeepseekV2ForCausalLM": Family(
        "deepseek-v2",
        experts=Experts(
            normalise=False,  # whatever `norm_topk_prob` says, as transformers does
            methods=("greedy", "group_limited_greedy"),
            **DEEPSEEK_EXPERTS,
        ),
        absent=DEEPSEEK_ABSENT | {"n_shared_experts": 2},
        **DEEPSEEK,
    ),
    "DeepseekV3ForCausalLM": Family(
        "deepseek-v3",
        experts=Experts(methods=("noaux_tc",), **DEEPSEEK_EXPERTS),
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
        windows=_every_layer,
        experts=Experts("intermediate_size", normalise=True),
        names=Names(experts="block_sparse_moe", expert_gate_up=("w1", "w3"), expert_down="w2"),
    ),
    "FalconForCausalLM": Family(
        "falcon",
        qkv_bias=_if_configured,
        output_bias=_if_configured,
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
        refused=("alibi",),
        usual=_usual_falcon,
        variant=_falcon,
        names=FALCON,
    ),
    "GPTJForCausalLM": Family(
        "gpt-j",
        mlp_bias=True,
        norm_place="once",
        parallel=True,
        gated=False,
        head_bias=True,
        neighbours=True,
        norm_kind="layer",
        activation="gelu_new",
        activation_key="activation_function",
        partial_rotary=True,
        absent={"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "mlp_bias": True},
        usual=_usual_gpt_j,
        names=Names(
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
}
"""By the architecture's name in `config.json`."""
