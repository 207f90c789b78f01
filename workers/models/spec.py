"""Reads a model's description (`ModelSpec`) from a checkpoint's `config.json`; needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.common.gguf.checkpoint import is_gguf
from penstock.common.gguf.documents import config_of
from penstock.common.rope_scaling import yarn_positions
from penstock.workers.models.alibi import AlibiSpec, alibi_slopes
from penstock.workers.models.config import BadCheckpoint, Config, Fields, read_json
from penstock.workers.models.deepseek import LatentSpec, RoutingSpec, read_latent, read_routing
from penstock.workers.models.family import Family
from penstock.workers.models.family_registry import ARCHITECTURE_ALIASES, FAMILIES
from penstock.workers.models.quantization import read_quantization
from penstock.workers.models.rope_config import RopeSpec, read_ropes, stretched_scores
from penstock.workers.models.sliding_window import read_windows
from penstock.workers.models.tensor_names import TensorNames
from penstock.workers.models.weight_scheme import QuantizationSpec


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The mixture-of-experts layers of a model."""

    num_experts: int
    top_k: int  # number of experts per token
    inner_size: int  # number of intermediate features of each expert
    normalise: bool  # whether the weights of a token's experts are divided by their sum
    shared_size: int  # number of intermediate features of the shared expert; 0: no shared expert
    layers: tuple[bool, ...]  # True for the layers with experts
    clamp: tuple[float, float] | None = None  # gpt-oss: gain and limit of the gate
    shared_gate: bool = True  # whether the shared expert's result is multiplied by a gate
    # parameters of DeepSeek's routing; None: choose the top k of a softmax
    routing: RoutingSpec | None = None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Complete description of a model for the native decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # maximum number of positions of a sequence
    eos_tokens: tuple[int, ...]
    tie_embeddings: bool
    head_bias: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: str  # norm of queries and keys: "", "head" (per head) or "whole" (over all heads)
    norm_position: str  # "before", "after", "both" or "once" (one norm for attention and MLP)
    parallel: bool  # whether attention and feed-forward read the same hidden states
    # QKV rows in the checkpoint are grouped: for each KV head, the query heads, the key, the value
    qkv_grouped: bool
    gated: bool  # whether the feed-forward layer has a gate
    sinks: bool  # attention sinks: each head's softmax has an extra learned score
    norm_kind: str  # "rms", "layer", "layer_unbiased" or "rms_above_one" (uses 1 + weight)
    norm_eps: float
    # with a gate "silu" or "gelu_pytorch_tanh"; without a gate "gelu" or "gelu_new"
    activation: str
    embedding_scale: float
    embedding_norm: bool
    qkv_clip: float  # queries, keys and values are clamped to [-qkv_clip, qkv_clip]; 0: no clamp
    attention_scale: float | None  # factor of the scores; None: 1 / sqrt(head_dim)
    attention_cap: float  # soft cap of the scores; 0: no cap
    logit_cap: float  # soft cap of the logits; 0: no cap
    alibi: AlibiSpec | None  # if set, there is no rotary embedding, and `rope` is ignored
    rope: RopeSpec
    # rotary embedding of layers with a window; None: `rope` applies to all layers
    local_rope: RopeSpec | None
    # for each layer, number of positions to which a token attends, including its own; 0: all
    windows: tuple[int, ...]
    experts: ExpertsSpec | None
    names: TensorNames
    dtype: str  # dtype of the checkpoint: float32, bfloat16 or float16
    latent: LatentSpec | None  # sizes of MLA; None: the model does not use MLA
    num_mtp_layers: int  # multi-token prediction layers in the checkpoint; they are not loaded
    quantization: QuantizationSpec | None = None  # None: not a quantized checkpoint

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        if self.alibi is not None:
            return ()
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    @property
    def rotated_dim(self) -> int:
        """Number of features of a head to which rotary embedding may apply."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def extra_dim(self) -> int:
        """Number of features added to a cached head: an ALiBi bias, then zeros to a multiple of 8.

        The value is 0 if the model does not use rounded ALiBi.
        """
        rounded = self.alibi is not None and self.alibi.rounded
        return 8 - self.head_dim % 8 if rounded else 0

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Shape of a position in the cache of a layer: (2 sides, or 1 for MLA; heads; features)."""
        if self.latent is None:
            return 2, self.num_kv_heads, self.head_dim + self.extra_dim
        return 1, 1, self.latent.rank + self.latent.rope_dim


def read_config(folder: Path) -> Fields:
    """Read the folder's `config.json`; replace the alias of an architecture by its usual name.

    `folder` may also be a GGUF file: its metadata takes the place of `config.json`.

    Raises:
        BadCheckpoint: if the file is missing or invalid.
        UnsupportedModel: if `architectures` does not have one entry.
    """
    if is_gguf(folder):
        return Fields(config_of(folder), folder)
    if not folder.is_dir():
        raise BadCheckpoint(f"{folder} is not a folder: give the path of a checkpoint folder")
    if not (folder / "config.json").is_file():
        raise BadCheckpoint(f"{folder} has no config.json: {_what_to_give(folder)}")
    config = Fields(read_json(folder / "config.json"), folder / "config.json")
    architectures = config.values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        found = f"architectures is {architectures!r:.80}: expected a list of one name"
        raise config.unsupported(f"{found}; {supported_architectures()}")
    name = ARCHITECTURE_ALIASES.get(str(architectures[0]), architectures[0])
    return Fields({**config.values, "architectures": [name]}, config.path)


def _what_to_give(folder: Path) -> str:
    files = sorted(each.name for each in folder.glob("*.gguf"))
    if files:
        return f"to serve a GGUF file, give the path of the file, such as {folder / files[0]}"
    return "give the path of a checkpoint folder"


def supported_architectures() -> str:
    """List the native architectures, for an error message."""
    return f"native architectures are {', '.join(sorted(FAMILIES))}"


def is_native(config: Fields) -> bool:
    """Return whether the native decoder, not `transformers`, runs the architecture."""
    return config.values["architectures"][0] in FAMILIES


def check_config(folder: Path) -> None:
    """Check from `config.json` that the folder's model can be served; raise as in `read_spec`."""
    config = read_config(folder)
    if is_native(config):
        read_spec(folder)
    elif read_quantization(config) is not None:
        raise config.unsupported(
            f"quantized weights are supported for native architectures only, and "
            f"{config.values['architectures'][0]} runs through transformers"
        )
    else:
        require_transformers(config)


def require_transformers(config: Fields) -> None:
    """Raise `UnsupportedModel` if `transformers` is not installed, as in router images."""
    if find_spec("transformers") is None:
        raise config.unsupported(
            f"{config.values['architectures'][0]} needs transformers, which is not installed "
            f"here: run `pip install transformers`; {supported_architectures()}"
        )


def read_spec(folder: Path) -> ModelSpec:
    """Read a model's spec from `config.json`, and EOS tokens as in `read_eos_tokens`.

    Raises:
        BadCheckpoint: if a file is missing or has invalid values.
        UnsupportedModel: if the architecture or one of its options is not supported.
    """
    config = read_config(folder)
    family = _family(config)
    values = {**family.absent, **config.values, **family.usual(config.values)}
    if values.get("rope_parameters") is None:
        # Like transformers, treat null as if the key were absent.
        values["rope_parameters"] = family.absent.get("rope_parameters")
    family = replace(family, **family.variant(values))
    return _build(Fields(values, config.path), family, read_eos_tokens(folder, config))


def _family(config: Fields) -> Family:
    values = config.values
    architecture = str(values["architectures"][0])
    family = FAMILIES.get(architecture)
    if family is None:
        raise config.unsupported(f"{architecture} is not supported; {supported_architectures()}")
    key = family.activation_key
    if values.get(key, family.activation) != family.activation:
        expected = family.activation
        raise config.unsupported(f"{key} {values[key]!r} is not supported: expected {expected!r}")
    for key in ("use_bidirectional_attention", *family.refused):
        if _value_at(values, key):
            raise config.unsupported(f"{key} {_value_at(values, key)!r:.40} is not supported")
    for key, served_value in family.only.items():
        value = _value_at(values, key)
        if value not in (None, served_value):
            raise config.unsupported(f"{key} {value!r} is not supported: expected {served_value!r}")
    return family


def _value_at(values: Config, key: str) -> Any:
    """Return the value at a dotted key ("a.b": key b of object a), or None if it is absent."""
    *outer, last = key.split(".")
    for name in outer:
        found = values.get(name)
        values = found if isinstance(found, Mapping) else {}
    return values.get(last)


def _build(config: Fields, family: Family, eos_tokens: tuple[int, ...]) -> ModelSpec:
    values = config.values
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    latent = read_latent(config) if family.latent else None
    num_kv_heads, head_dim = _heads(config, family, latent)
    alibi = _alibi(config, family, num_heads, num_kv_heads)
    rope, local_rope = RopeSpec(theta=10000.0), None
    if alibi is None:
        rope, local_rope = read_ropes(config, family.partial_rotary, family.local_theta)
        rope = _checked_rope(config, family, rope, latent.rope_dim if latent else head_dim)
    return ModelSpec(
        family=family.name,
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.size("intermediate_size"),
        num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=max(config.size("max_position_embeddings"), yarn_positions(values)),
        eos_tokens=eos_tokens,
        tie_embeddings=config.flag("tie_word_embeddings"),
        head_bias=family.head_bias,
        qkv_bias=family.qkv_bias(values),
        output_bias=family.output_bias(values),
        mlp_bias=family.mlp_bias and config.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        norm_position=family.norm_position,
        parallel=family.parallel,
        qkv_grouped=family.qkv_grouped,
        gated=family.gated,
        sinks=family.sinks,
        norm_kind=family.norm_kind,
        activation=family.activation,
        embedding_scale=hidden_size**0.5 if family.scaled_embeddings else 1.0,
        embedding_norm=family.embedding_norm,
        qkv_clip=_if_given(config, "clip_qkv", family.clips),
        attention_scale=_attention_scale(config, family, head_dim),
        attention_cap=_if_given(config, "attn_logit_softcapping", family.soft_caps),
        logit_cap=_if_given(config, "final_logit_softcapping", family.soft_caps),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        alibi=alibi,
        rope=rope,
        local_rope=local_rope,
        windows=read_windows(config, family.windows),
        experts=_experts(config, family),
        names=family.names,
        dtype=read_dtype(config),
        latent=latent,
        num_mtp_layers=config.count("num_nextn_predict_layers"),
        quantization=read_quantization(config),
    )


def _heads(config: Fields, family: Family, latent: LatentSpec | None) -> tuple[int, int]:
    """Return the number of KV heads, and the number of features of a query head."""
    if latent is not None:
        return 1, latent.head_dim
    num_heads = config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.bad("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    default = family.head_dim or config.size("hidden_size") // num_heads
    head_dim = config.size("head_dim", default)
    if head_dim % 2 and not family.alibi:
        raise config.bad("head_dim", "an even number, which rotary embeddings require")
    return num_kv_heads, head_dim


def _attention_scale(config: Fields, family: Family, head_dim: int) -> float | None:
    if family.latent:
        return float(head_dim**-0.5 * stretched_scores(config))
    if family.alibi and config.values.get("softmax_scale") is not None:
        return config.number("softmax_scale", 1.0)
    if not family.soft_caps:
        return None
    return float(config.number("query_pre_attn_scalar", 256) ** -0.5)


def _if_given(config: Fields, key: str, used: bool) -> float:
    """Return the number at `key`, or 0 if the key is absent or `used` is False."""
    if not used or config.values.get(key) is None:
        return 0.0
    return config.number(key, 1.0)


def _alibi(config: Fields, family: Family, num_heads: int, num_kv_heads: int) -> AlibiSpec | None:
    if not family.alibi:
        return None
    rounded = family.alibi == "rounded"
    if rounded and num_kv_heads != num_heads:
        raise config.unsupported(
            f"ALiBi needs {num_heads} KV heads, as many as query heads, not {num_kv_heads}"
        )
    return AlibiSpec(alibi_slopes(num_heads, config.size("alibi_bias_max", 8)), rounded)


def _checked_rope(config: Fields, family: Family, rope: RopeSpec, head_dim: int) -> RopeSpec:
    num_features = int(head_dim * rope.rotated_fraction)
    if num_features % 2 or not 0 < num_features <= head_dim:
        raise BadCheckpoint(
            f"{config.path}: partial_rotary_factor is {rope.rotated_fraction:g}: expected a number "
            f"above 0 and at most 1 whose product with head_dim ({head_dim}) is even"
        )
    if rope.kind == "longrope" and 2 * len(rope.divisors) != num_features:
        raise BadCheckpoint(
            f"{config.path}: rope_type 'longrope' has {len(rope.divisors)} factors: expected "
            f"{num_features // 2}"
        )
    interleaved = family.latent and config.flag("rope_interleave", True)
    return replace(rope, interleaved=interleaved or family.interleaved)


def _experts(config: Fields, family: Family) -> ExpertsSpec | None:
    found = family.experts
    if found is None:
        return None
    keys = ("n_routed_experts", "num_experts")
    key = next((key for key in keys if key in config.values), "num_local_experts")
    num_experts = config.size(key)
    top_k = config.size("num_experts_per_tok")
    if top_k > num_experts:
        raise config.bad("num_experts_per_tok", f"1 to {num_experts}, the number of experts")
    try:
        layers = tuple(found.layers(config.values))
    except (TypeError, ZeroDivisionError):
        # These calls raise BadCheckpoint if their key is the cause, also if its value is null.
        for key, least in (("decoder_sparse_step", 1), ("first_k_dense_replace", 0)):
            if key in config.values:
                config.at_least(key, least)
        raise config.bad("mlp_only_layers", "a list of layer numbers") from None
    shared_size = config.size(found.shared_size) if found.shared_size else 0
    if found.shared_count:
        shared_size = config.size(found.shared_count) * config.size(found.inner_size)
    routing = read_routing(config, found.methods, num_experts, top_k) if found.methods else None
    return ExpertsSpec(
        num_experts=num_experts,
        top_k=top_k,
        inner_size=config.size(found.inner_size),
        normalise=config.flag("norm_topk_prob") if found.normalise is None else found.normalise,
        shared_size=shared_size,
        layers=layers,
        clamp=_clamp(config) if found.clamped else None,
        shared_gate=not found.shared_count,
        routing=routing,
    )


def _clamp(config: Fields) -> tuple[float, float]:
    return config.number("swiglu_alpha", 1.702), config.number("swiglu_limit", 7.0)


def read_dtype(config: Fields) -> str:
    values = config.values
    name = str(values.get("dtype") or values.get("torch_dtype") or "float32")
    if name not in ("float32", "bfloat16", "float16"):
        raise config.unsupported(
            f"dtype {name!r} is not supported: expected float32, bfloat16 or float16"
        )
    return name


def read_eos_tokens(folder: Path, config: Fields) -> tuple[int, ...]:
    """Return the EOS token ids of `generation_config.json` if present, else of `config.json`."""
    found = None
    path = folder / "generation_config.json"
    if path.is_file():
        found = read_json(path).get("eos_token_id")
    if found is None:
        found, path = config.values.get("eos_token_id"), config.path
    tokens = [] if found is None else found if isinstance(found, list) else [found]
    if any(type(token) is not int or token < 0 for token in tokens):
        raise BadCheckpoint(f"{path}: eos_token_id is {found!r:.40}: expected token ids")
    return tuple(tokens)
