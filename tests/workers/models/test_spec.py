"""Parsing of `config.json` into a `ModelSpec`, and errors for unsupported or invalid values."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.workers.models.alibi import AlibiSpec
from penstock.workers.models.config import BadCheckpoint, UnsupportedModel
from penstock.workers.models.deepseek import LatentSpec, RoutingSpec
from penstock.workers.models.rope_config import RopeSpec
from penstock.workers.models.spec import ExpertsSpec, read_config, read_spec

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = {
    "type": "su",
    "short_factor": [1.0, 2.0, 3.0, 4.0],
    "long_factor": [2.0, 4.0, 6.0, 8.0],
    "original_max_position_embeddings": 64,
}
PHI3 = {"architectures": ["Phi3ForCausalLM"]}


def write(folder: Path, **changes: Any) -> Path:
    values = {key: value for key, value in (CONFIG | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_defaults(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path))
    assert (spec.family, spec.num_kv_heads, spec.head_dim) == ("llama", 4, 8)
    assert spec.windows == (0, 0, 0)
    assert spec.rope == RopeSpec(10000.0)
    assert spec.eos_tokens == (2,)
    assert not spec.tie_embeddings
    # The spec is unchanged: x.py is not run.
    assert read_spec(write(tmp_path, auto_map={"AutoModel": "x.py"})) == spec
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (False, False, False)
    assert (spec.num_layers, spec.kv_shape) == (3, (2, 4, 8))


def test_old_and_new_rope_scaling_keys_are_equivalent(tmp_path: Path) -> None:
    expected = RopeSpec(5e5, "llama3", 8.0, 1.0, 4.0, 64)
    older = read_spec(write(tmp_path, rope_theta=5e5, rope_scaling=LLAMA3))
    assert older.rope == expected
    newer = read_spec(write(tmp_path, rope_parameters=LLAMA3 | {"rope_theta": 5e5}))
    assert newer.rope == expected
    oldest = read_spec(write(tmp_path, rope_scaling={"type": "linear", "factor": 2}))
    assert oldest.rope == RopeSpec(10000.0, "linear", 2.0)


def test_yarn_extends_the_context_to_the_original_length_times_the_factor(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read_spec(write(tmp_path, rope_scaling=yarn)).max_model_len == 512
    newer = {"rope_theta": 1e6, "rope_type": "yarn"} | yarn
    assert read_spec(write(tmp_path, rope_parameters=newer)).max_model_len == 512
    smaller = yarn | {"original_max_position_embeddings": 16}
    assert read_spec(write(tmp_path, rope_scaling=smaller)).max_model_len == 128
    linear = {"type": "linear", "factor": 4.0, "original_max_position_embeddings": 128}
    assert read_spec(write(tmp_path, rope_scaling=linear)).max_model_len == 128


def test_yarn_multiplies_the_scale_by_attn_factor(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

    def scale(**more: Any) -> float:
        return read_spec(write(tmp_path, rope_scaling=yarn | more)).rope.scale

    plain = 0.1 * math.log(4) + 1
    assert scale() == scale(attn_factor=None) == pytest.approx(plain)
    # DeepSeek-R1-0528-Qwen3-8B cancels YaRN's scale with this factor.
    assert scale(attn_factor=0.8782488562869419) == pytest.approx(1.0)
    assert scale(attn_factor=0.5, mscale=1.0, mscale_all_dim=1.0) == pytest.approx(0.5)
    assert scale(attn_factor=0.5, attention_factor=1.25) == 1.25


def test_longrope_uses_the_short_factors_for_short_contexts(tmp_path: Path) -> None:
    rope = read_spec(write(tmp_path, **PHI3, rope_scaling=LONG)).rope
    assert (rope.kind, rope.factor, rope.divisors) == ("longrope", 2.0, (2.0, 4.0, 6.0, 8.0))
    yarn = write(tmp_path, **PHI3, rope_scaling=LONG | {"type": "yarn"})
    assert read_spec(yarn).rope == rope
    assert rope.within(65) == rope
    assert rope.within(64).divisors == (1.0, 2.0, 3.0, 4.0)
    short = read_spec(write(tmp_path, **PHI3, rope_scaling=LONG, max_position_embeddings=64))
    assert short.rope.divisors == (1.0, 2.0, 3.0, 4.0)


def test_custom_code_of_a_checkpoint_is_ignored(tmp_path: Path) -> None:
    assert read_spec(write(tmp_path, auto_map={"AutoModel": "x.py"})).family == "llama"


FALCON: dict[str, Any] = {
    "architectures": ["FalconForCausalLM"],
    "intermediate_size": "absent",
    "max_position_embeddings": "absent",
}


def test_falcon(tmp_path: Path) -> None:
    first = read_spec(write(tmp_path, **FALCON))
    assert (first.num_kv_heads, first.intermediate_size, first.max_model_len) == (1, 128, 2048)
    assert (first.norm_position, first.parallel, first.tie_embeddings) == ("once", True, True)
    new = FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
    wide = read_spec(write(tmp_path, **new, ffn_hidden_size=50))
    assert (wide.num_kv_heads, wide.intermediate_size, wide.qkv_bias) == (2, 50, True)
    assert (wide.names.attention_norm, wide.names.mlp_norm) == ("ln_attn", "ln_mlp")
    assert read_spec(write(tmp_path, **new, num_ln_in_parallel_attn=1)).norm_position == "once"
    serial = read_spec(write(tmp_path, **FALCON, multi_query=False, parallel_attn=False))
    assert (serial.num_kv_heads, serial.norm_position, serial.parallel) == (4, "before", False)


OWN_KEYS = dict.fromkeys(
    ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), "absent"
) | {"max_position_embeddings": "absent"}
BLOOM: dict[str, Any] = {
    **OWN_KEYS,
    "architectures": ["BloomForCausalLM"],
    "n_embed": 42,
    "n_head": 6,
    "n_layer": 3,
    "layer_norm_epsilon": 0.25,
}
MPT: dict[str, Any] = {
    **OWN_KEYS,
    "architectures": ["MptForCausalLM"],
    "d_model": 42,
    "n_heads": 6,
    "n_layers": 3,
    "learned_pos_emb": True,
}


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("MPTForCausalLM", "MptForCausalLM"),
        ("PhiMoEForCausalLM", "PhimoeForCausalLM"),
        ("ExaoneMoEForCausalLM", "ExaoneMoeForCausalLM"),
    ],
)
def test_alias_of_an_architecture_is_read_as_its_usual_name(
    tmp_path: Path, alias: str, name: str
) -> None:
    folder = write(tmp_path, architectures=[alias])
    assert read_config(folder).values["architectures"] == [name]


def test_mpt_is_read_by_its_alias(tmp_path: Path) -> None:
    expected = read_spec(write(tmp_path, **MPT))
    assert read_spec(write(tmp_path, **MPT | {"architectures": ["MPTForCausalLM"]})) == expected


SLOPES = (2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3)


def test_bloom(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, **BLOOM, n_inner=None, seq_length=99))
    assert (spec.hidden_size, spec.intermediate_size, spec.head_dim) == (42, 168, 7)
    assert (spec.num_layers, spec.max_model_len, spec.norm_eps) == (3, 99, 0.25)
    assert spec.alibi == AlibiSpec(SLOPES)
    assert (spec.ropes, spec.kv_shape) == ((), (2, 6, 7))
    assert (spec.qkv_bias, spec.mlp_bias, spec.tie_embeddings) == (True, True, True)
    renamed = {"n_embed": "absent", "hidden_size": 42, "n_head": "absent"}
    assert read_spec(write(tmp_path, **BLOOM | renamed | {"num_attention_heads": 6,
                                                          "seq_length": 99})) == spec  # fmt: skip


def test_mpt(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, **MPT, attn_config={"alibi": True, "clip_qkv": None}))
    assert (spec.hidden_size, spec.intermediate_size, spec.max_model_len) == (42, 168, 2048)
    assert (spec.alibi, spec.qkv_clip, spec.attention_scale) == (AlibiSpec(SLOPES), 0.0, None)
    assert (spec.qkv_bias, spec.output_bias, spec.mlp_bias) == (False, False, False)
    given = {"alibi_bias_max": 16, "clip_qkv": 6, "softmax_scale": 0.5}
    spec = read_spec(write(tmp_path, **MPT, attn_config=given, expansion_ratio=2))
    assert spec.alibi == AlibiSpec(tuple(slope**2 for slope in SLOPES))
    assert (spec.qkv_clip, spec.attention_scale, spec.intermediate_size) == (6.0, 0.5, 84)


def test_falcon_with_alibi(tmp_path: Path) -> None:
    given = {"alibi": True, "multi_query": False, "parallel_attn": False}
    spec = read_spec(write(tmp_path, **FALCON, **given))
    assert spec.alibi == AlibiSpec((2**-2, 2**-4, 2**-6, 2**-8), rounded=True)
    assert (spec.ropes, spec.kv_shape) == ((), (2, 4, 8 + 8))


GPT_J: dict[str, Any] = {
    "architectures": ["GPTJForCausalLM"],
    "vocab_size": 100,
    "n_embd": 92,
    "n_head": 2,
    "n_layer": 3,
    "n_positions": 64,
    "rotary_dim": 26,  # head_dim is 46; rounding makes 46 * (26 / 46) less than 26
}


def test_gpt_j(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT_J))
    spec = read_spec(tmp_path)
    assert (spec.hidden_size, spec.head_dim, spec.intermediate_size) == (92, 46, 368)
    assert (spec.num_layers, spec.max_model_len, spec.rope.interleaved) == (3, 64, True)
    assert int(spec.head_dim * spec.rope.rotated_fraction) == 26


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def test_gpt_oss(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, **GPT_OSS))
    assert spec.experts == ExpertsSpec(8, 2, 64, True, 0, (True,) * 3, (1.702, 7.0))
    assert (spec.sinks, spec.head_dim, spec.windows) == (True, 64, (128, 0, 128))
    assert (spec.qkv_bias, spec.output_bias) == (True, True)
    yarn = RopeSpec(150000.0, "yarn", 32.0, original_max_len=4096, truncate=False)
    assert replace(spec.rope, scale=1.0) == yarn
    assert spec.rope.scale == pytest.approx(0.1 * math.log(32) + 1)
    assert read_spec(write(tmp_path, **GPT_OSS, rope_parameters=None)) == spec
    plain = read_spec(write(tmp_path, **GPT_OSS, rope_parameters={"rope_type": "default"}))
    assert plain.rope == RopeSpec(150000.0)


@pytest.mark.parametrize(
    ("architecture", "norm_eps", "theta", "window"),
    [
        ("LlamaForCausalLM", 1e-6, 1e4, 0),
        ("MistralForCausalLM", 1e-6, 1e4, 4096),
        ("Olmo2ForCausalLM", 1e-5, 1e4, 0),
        ("Phi3ForCausalLM", 1e-5, 1e4, 0),
        ("GptOssForCausalLM", 1e-5, 150000.0, 128),
        ("MixtralForCausalLM", 1e-5, 1e6, 0),
    ],
)
def test_absent_keys_have_the_defaults_of_transformers(
    tmp_path: Path, architecture: str, norm_eps: float, theta: float, window: int
) -> None:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2}
    spec = read_spec(write(tmp_path, architectures=[architecture], **experts))
    assert (spec.norm_eps, spec.rope.theta, spec.windows[0]) == (norm_eps, theta, window)
    given = {"rms_norm_eps": 0.5, "rope_theta": 7.0, "sliding_window": None}
    spec = read_spec(write(tmp_path, architectures=[architecture], **experts, **given))
    assert (spec.norm_eps, spec.rope.theta, spec.windows) == (0.5, 7.0, (0, 0, 0))


GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, "sliding_window": 9}


def test_gemma_defaults_fill_missing_keys(tmp_path: Path) -> None:
    gemma2 = read_spec(write(tmp_path, architectures=["Gemma2ForCausalLM"]))
    assert (gemma2.attention_cap, gemma2.logit_cap, gemma2.head_dim) == (50.0, 30.0, 256)
    assert gemma2.windows == (4096, 0, 4096)
    assert gemma2.tie_embeddings
    gemma3 = read_spec(write(tmp_path, **GEMMA3))
    assert (gemma3.attention_cap, gemma3.logit_cap) == (0.0, 0.0)
    assert gemma3.windows == (9, 9, 9, 9, 9, 0)
    assert gemma3.attention_scale == 256**-0.5


def test_sliding_window_layers_have_their_own_rope(tmp_path: Path) -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    older = read_spec(
        write(tmp_path, **GEMMA3, rope_theta=1e6, rope_local_base_freq=500.0, rope_scaling=scaling)
    )
    assert older.ropes == (RopeSpec(1e6, "linear", 8.0), RopeSpec(500.0))
    both = {
        "full_attention": scaling | {"rope_theta": 1e6},
        "sliding_attention": {"rope_theta": 500.0},
    }
    assert read_spec(write(tmp_path, **GEMMA3, rope_parameters=both)).ropes == older.ropes


def test_generation_config_overrides_eos_tokens(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert read_spec(tmp_path).eos_tokens == (7, 9)
    (tmp_path / "generation_config.json").write_text('{"temperature": 1}')
    assert read_spec(tmp_path).eos_tokens == (2,)
    assert read_spec(write(tmp_path, eos_token_id=None)).eos_tokens == ()


def test_sliding_windows_per_layer(tmp_path: Path) -> None:
    def windows(architecture: str, **changes: Any) -> tuple[int, ...]:
        folder = write(tmp_path, architectures=[architecture], sliding_window=9, **changes)
        return read_spec(folder).windows

    upper = {"use_sliding_window": True, "max_window_layers": 1}
    named = ["sliding_attention", "full_attention", "full_attention"]
    assert windows("LlamaForCausalLM") == (0, 0, 0)
    assert windows("MistralForCausalLM") == (9, 9, 9)
    assert windows("Qwen2ForCausalLM") == (0, 0, 0)
    assert windows("Qwen2ForCausalLM", **upper) == (0, 9, 9)
    assert windows("Qwen3ForCausalLM", **upper, layer_types=named) == (9, 0, 0)


def test_biases_and_qk_norms_of_each_family(tmp_path: Path) -> None:
    qwen2 = read_spec(write(tmp_path, architectures=["Qwen2ForCausalLM"]))
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, "")
    qwen3 = read_spec(write(tmp_path, architectures=["Qwen3ForCausalLM"]))
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.qk_norm) == (False, False, "head")
    assert qwen3.head_dim == 128
    llama = read_spec(write(tmp_path, attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)


MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def test_moe_settings(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, **MOE, mlp_only_layers=[0], norm_topk_prob=True))
    assert spec.experts == ExpertsSpec(8, 2, 16, True, 0, (False, True, True))
    renamed = MOE | {"num_experts": "absent", "num_local_experts": 6}
    spec = read_spec(write(tmp_path, **renamed, decoder_sparse_step=2))
    assert spec.experts == ExpertsSpec(6, 2, 16, False, 0, (False, True, False))


V2 = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}
V3 = V2 | {"architectures": ["DeepseekV3ForCausalLM"], "n_group": 4, "topk_group": 2}


def test_mla_settings(tmp_path: Path) -> None:
    spec = read_spec(write(tmp_path, **V3, num_key_value_heads=4, head_dim=64))
    assert spec.latent == LatentSpec(512, 1536, plain_dim=128, rope_dim=64, value_dim=128)
    assert (spec.head_dim, spec.rotated_dim, spec.attention_scale) == (192, 64, 192**-0.5)
    assert spec.kv_shape == (1, 1, 576)
    assert spec.rope.interleaved
    assert not read_spec(write(tmp_path, **V3, rope_interleave=False)).rope.interleaved
    lite = read_spec(write(tmp_path, **V2, q_lora_rank=None, kv_lora_rank=20)).latent
    assert lite is not None
    assert (lite.rank, lite.query_rank) == (20, 0)


def test_yarn_changes_the_attention_scale_of_mla(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 40, "mscale": 0.7, "mscale_all_dim": 0.5}
    stretched = read_spec(write(tmp_path, **V3, rope_scaling=yarn)).attention_scale
    assert stretched == pytest.approx(192**-0.5 * (0.05 * math.log(40) + 1) ** 2)
    without = yarn | {"mscale_all_dim": 0}
    assert read_spec(write(tmp_path, **V3, rope_scaling=without)).attention_scale == 192**-0.5


def test_expert_routing_methods(tmp_path: Path) -> None:
    def routing(**changes: Any) -> RoutingSpec | None:
        experts = read_spec(write(tmp_path, **changes)).experts
        assert experts is not None
        assert (experts.shared_size, experts.shared_gate) in ((16, False), (32, False))
        return experts.routing

    assert routing(**V3) == RoutingSpec("noaux_tc", 2.5, 4, 2)
    assert routing(**V2) == RoutingSpec("greedy", 1.0)
    groups = {"topk_method": "group_limited_greedy", "n_group": 12, "topk_group": 3}
    limited = V2 | groups | {"routed_scaling_factor": 16}
    assert routing(**limited) == RoutingSpec("group_limited_greedy", 16.0, 12, 3)
    v2, v3 = (read_spec(write(tmp_path, **changes)).experts for changes in (V2, V3))
    assert v2 is not None
    assert v3 is not None
    assert (v2.normalise, v2.layers, v2.shared_size) == (False, (True,) * 3, 32)
    assert (v3.normalise, v3.layers, v3.shared_size) == (True, (False,) * 3, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT9LM"]}, "GPT9LM is not supported.*Llama.*Mistral.*Qwen2.*Qwen3"),
        ({"architectures": "absent"}, "expected a list of one name.*LlamaForCausalLM"),
        (FALCON | {"alibi": True}, "ALiBi needs .* KV heads, as many"),
        (BLOOM | {"slow_but_exact": True}, "slow_but_exact True is not supported"),
        (BLOOM | {"apply_residual_connection_post_layernorm": True}, "residual_connection_post"),
        (MPT | {"attn_config": {"alibi": False}}, "attn_config.alibi False.* expected True"),
        (MPT | {"attn_config": {"qk_ln": True}}, "attn_config.qk_ln True is not supported"),
        (MPT | {"attn_config": {"prefix_lm": True}}, "attn_config.prefix_lm True is not supported"),
        (MPT | {"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type 'multiquery"),
        (MPT | {"no_bias": False}, "no_bias False.* expected True"),
        (MPT | {"norm_type": "rmsnorm"}, "norm_type 'rmsnorm'.*'low_precision_layernorm'"),
        (MPT | {"logit_scale": 0.5}, "logit_scale 0.5 is not supported"),
        (GPT_J | {"activation_function": "relu"}, "activation_function 'relu'.*'gelu_new'"),
        ({"quantization_config": {"quant_method": "quip"}}, "quip are not supported.*bfloat16"),
        (
            {"quantization_config": {"quant_method": "mxfp4"}},
            "mxfp4 are supported for GptOss.*only",
        ),
        (V3 | {"quantization_config": {"quant_method": "fp8", "fmt": "e5m2"}}, "fmt 'e5m2'"),
        (V3 | {"topk_method": "greedy"}, "topk_method 'greedy'.*noaux_tc"),
        (V2 | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc'.*greedy"),
        (V3 | {"scoring_func": "softmax"}, "scoring_func 'softmax' .* expected 'sigmoid'"),
        (V3 | {"moe_layer_freq": 2}, "moe_layer_freq"),
        (V2 | {"q_lora_rank": None, "attention_bias": True}, "attention_bias is true and q_lora"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 4}}, "spiral.*llama3.*yarn"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1.0}}},
            "different parameters for different layers",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (GEMMA3 | {"hidden_activation": "relu"}, "relu.*gelu_pytorch_tanh"),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"dtype": "float8"}, "float8"),
    ],
)
def test_unsupported_setting_is_named_in_the_error(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read_spec(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (MOE | {"num_experts": "absent"}, "has no num_local_experts"),
        (MOE | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9.*expected 1 to 8"),
        (MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (MOE | {"decoder_sparse_step": None}, "decoder_sparse_step is null"),
        (GEMMA3 | {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (GEMMA3 | {"sliding_window_pattern": None}, "sliding_window_pattern is null"),
        (MOE | {"moe_intermediate_size": "absent"}, "moe_intermediate_size"),
        (V3 | {"n_group": 5}, "n_group is 5.*12 experts"),
        (V3 | {"n_group": 12, "topk_group": 12}, "n_group is 12.*expected a number that divides"),
        (V3 | {"topk_group": 5}, "topk_group is 5"),
        (V3 | {"num_experts_per_tok": 7}, "topk_group is 2.*num_experts_per_tok \\(7\\)"),
        (V3 | {"qk_rope_head_dim": 7}, "qk_rope_head_dim is 7.*even"),
        (V3 | {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        (V3 | {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        ({"vocab_size": "absent"}, "has no vocab_size"),
        ({"hidden_size": -3}, "hidden_size is -3"),
        ({"hidden_size": 1 << 60}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_hidden_layers": "3"}, "num_hidden_layers is '3'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3.*divisor"),
        ({"head_dim": 7}, "head_dim is 7"),
        (MPT | {"attn_config": {"alibi_bias_max": -1}}, "alibi_bias_max is -1"),
        (MPT | {"attn_config": {"clip_qkv": "6"}}, "clip_qkv is '6'"),
        (MPT | {"attn_config": {"softmax_scale": 0}}, "softmax_scale is 0"),
        (MPT | {"expansion_ratio": 1.5}, "has no intermediate_size"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"rope_theta": -1.0}, "rope_theta is -1"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "has no factor"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": LONG | {"long_factor": [1, "x", 3]}}, "long_factor is .*numbers"),
        (
            {"rope_scaling": LONG | {"long_factor": [1.0] * 3}},
            "longrope.* has 3 factors: expected 4",
        ),
        ({"rope_scaling": LONG | {"factor": -1}}, "factor is -1"),
        ({"rope_scaling": {"type": "yarn", "beta_fast": 0}}, "beta_fast is 0"),
        ({"rope_scaling": {"type": "yarn", "attn_factor": "1"}}, "attn_factor is '1'"),
        (PHI3 | {"partial_rotary_factor": 0.4}, "partial_rotary_factor is 0.4.*even"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": "9"}, "sliding_window"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            "layer_types.*a list of . entries .num_hidden_layers",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": 5,
            },
            "layer_types",
        ),
    ],
)
def test_invalid_value_is_named_in_the_error(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(BadCheckpoint, match=message):
        read_spec(write(tmp_path, **changes))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "cannot be parsed as JSON"),
        (b"\xff\xfe", "cannot be parsed as JSON"),
        (b"[" * 100_000, "cannot be parsed as JSON"),
        (b"[1]", "no JSON object"),
    ],
)
def test_config_that_is_not_a_json_object_is_refused(
    tmp_path: Path, text: bytes, message: str
) -> None:
    (tmp_path / "config.json").write_bytes(text)
    with pytest.raises(BadCheckpoint, match=message):
        read_spec(tmp_path)


def test_missing_folder_or_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="not a folder"):
        read_spec(tmp_path / "nowhere")
    with pytest.raises(BadCheckpoint, match=r"no config\.json"):
        read_spec(tmp_path)
