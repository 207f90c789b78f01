"""Description of a model family: its differences from Llama."""

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
    """Return a list: True for every `decoder_sparse_step`-th layer not in `mlp_only_layers`."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    layers = range(config["num_hidden_layers"])
    return [layer not in dense and (layer + 1) % step == 0 for layer in layers]


def nothing(config: Config) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class ExpertConfigKeys:
    """Keys of `config.json` that describe a mixture of experts."""

    inner_size: str
    # whether the experts' weights are normalised; None: the key `norm_topk_prob` decides
    normalise: bool | None = None
    shared_size: str | None = None
    layers: Callable[[Config], list[bool]] = sparse_layers
    clamped: bool = False  # gpt-oss: all experts in one tensor, with biases and a clamped gate
    shared_count: str | None = None  # key with the number of shared experts, which have no gate
    methods: tuple[str, ...] = ()  # DeepSeek: supported values of `topk_method`, default first


@dataclass(frozen=True, slots=True)
class Family:
    """A model family: its differences from Llama, and rules for reading its `config.json`."""

    name: str
    qkv_bias: Callable[[Config], bool] = never
    output_bias: Callable[[Config], bool] = never  # bias of the attention's output projection
    mlp_bias: bool = False  # whether the key `mlp_bias` is read
    qk_norm: str = ""  # norm of queries and keys: "", "head" (per head), "whole" (over all heads)
    # "before", "after", "both" or "once" (attention and MLP share one norm)
    norm_position: str = "before"
    parallel: bool = False  # whether attention and feed-forward read the same hidden states
    # QKV rows in the checkpoint are grouped: for each KV head, the query heads, the key, the value
    qkv_grouped: bool = False
    gated: bool = True  # whether the feed-forward layer has a gate
    head_bias: bool = False
    interleaved: bool = False  # whether rotary embedding rotates pairs of adjacent features
    # window of each layer, in positions; 0: no window
    windows: Callable[[Config], list[int]] = no_window
    head_dim: int | None = None  # default of `head_dim`; None: hidden_size / number of heads
    experts: ExpertConfigKeys | None = None
    # "rms", "layer", "layer_unbiased" or "rms_above_one" (multiplies by 1 + weight)
    norm_kind: str = "rms"
    embedding_norm: bool = False  # whether a norm is applied to the embeddings
    # with a gate "silu" or "gelu_pytorch_tanh"; without a gate "gelu" or "gelu_new"
    activation: str = "silu"
    activation_key: str = "hidden_act"  # key of the activation in `config.json`
    scaled_embeddings: bool = False  # whether embeddings are multiplied by sqrt(hidden_size)
    sinks: bool = False  # attention sinks: each head's softmax has an extra learned score
    alibi: str = ""  # "exact" or "rounded": ALiBi replaces rotary embedding; "": no ALiBi
    clips: bool = False  # queries, keys and values are clamped to [-clip_qkv, clip_qkv]
    # whether `config.json` has soft caps of scores and logits, and an attention scale
    soft_caps: bool = False
    # default rope base of layers with a window; None: such layers have no base of their own
    local_theta: float | None = None
    absent: Config = field(default_factory=dict)  # defaults for keys absent from `config.json`
    partial_rotary: bool = False  # whether `partial_rotary_factor` is read
    refused: tuple[str, ...] = ()  # keys that must be unset or false; "a.b" is key b of object a
    only: Config = field(default_factory=dict)  # keys, each with its only supported value
    # function that returns values under Llama's keys
    usual: Callable[[Config], dict[str, Any]] = nothing
    # function that returns the fields of `Family` that `config.json` overrides
    variant: Callable[[Config], dict[str, Any]] = nothing
    latent: bool = False  # whether the family uses MLA
    names: TensorNames = field(default_factory=TensorNames)
