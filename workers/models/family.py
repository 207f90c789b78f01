"""What may set a family of models apart from the one decoder."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from penstock.workers.models.config import Config
from penstock.workers.models.sliding_window import no_window
from penstock.workers.models.tensor_names import TensorNames


def if_configured(config: Config) -> bool:
    return bool(config.get("attention_bias", False))


def if_not_denied(config: Config) -> bool:
    return bool(config.get("qkv_bias", True))


def always(config: Config) -> bool:
    return True


def never(config: Config) -> bool:
    return False


def sparse_layers(config: Config) -> list[bool]:
    """Every `decoder_sparse_step`th layer that `mlp_only_layers` does not name."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    return [layer not in dense and (layer + 1) % step == 0 for layer in layers]


def nothing(config: Config) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class ExpertConfigKeys:
    """Where a mixture of experts has its numbers in `config.json`."""

    inner_size: str
    normalise: bool | None = None  # None: as `norm_topk_prob` says
    shared_size: str | None = None
    layers: Callable[[Config], list[bool]] = sparse_layers
    clamped: bool = False  # all in one tensor, with biases and a clamped gate: gpt-oss
    shared_count: str | None = None  # of shared experts as large as the others, without a gate
    methods: tuple[str, ...] = ()  # the values of `topk_method`, DeepSeek's, the usual one first


@dataclass(frozen=True, slots=True)
class Family:
    """How one family reads its `config.json`."""

    name: str
    qkv_bias: Callable[[Config], bool] = never
    output_bias: Callable[[Config], bool] = never  # of the attention's output projection
    mlp_bias: bool = False  # whether `mlp_bias` is looked at
    qk_norm: str = ""  # queries and keys are normalised: "head" by head, or "whole"
    norm_position: str = "before"  # attention and feed-forward, or "after" them, "both" or "once"
    parallel: bool = False  # attention and feed-forward read the same stream
    qkv_grouped: bool = False  # in the checkpoint: each KV head's query heads, key and value
    gated: bool = True  # the feed-forward layer
    head_bias: bool = False
    interleaved: bool = False  # rotary embedding turns pairs of neighbours
    windows: Callable[[Config], list[int]] = no_window  # positions seen, a layer; 0: all
    head_dim: int | None = None  # where the configuration is silent; None: hidden / heads
    experts: ExpertConfigKeys | None = None
    norm_kind: str = "rms"  # or "layer", "layer_unbiased", "rms_above_one": weights from one on
    embedding_norm: bool = False  # embeddings are normalised
    activation: str = "silu"  # or "gelu_pytorch_tanh"; without a gate "gelu" or "gelu_new"
    activation_key: str = "hidden_act"  # in `config.json`
    scaled_embeddings: bool = False  # by the square root of their size
    sinks: bool = False  # each head has a score that takes probability and gives nothing
    alibi: str = ""  # instead of rotary embedding: "exact", or "rounded"
    clips: bool = False  # queries, keys and values, to `clip_qkv`
    soft_caps: bool = False  # and a scale of the scores that is configured
    local_theta: float | None = None  # of the layers with a window, if theirs is another
    absent: Config = field(default_factory=dict)  # what a key means that is not there
    partial_rotary: bool = False  # whether `partial_rotary_factor` is looked at
    refused: tuple[str, ...] = ()  # keys of what is not served; "a.b" is b in the object a
    only: Config = field(default_factory=dict)  # keys of which one value is served
    usual: Callable[[Config], dict[str, Any]] = nothing  # its configuration in Llama's keys
    variant: Callable[[Config], dict[str, Any]] = nothing  # fields that it changes here
    latent: bool = False  # keys and values are cached compressed
    names: TensorNames = field(default_factory=TensorNames)
