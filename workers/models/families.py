"""The families of models that are served: what sets each apart from the one decoder.

A family is named in `config.json` by its architecture. To add one, add a row (and, if it needs
what no family had, a field here and its meaning in the decoder).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Config: TypeAlias = Mapping[str, Any]


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


def _if_configured(config: Config) -> bool:
    return bool(config.get("attention_bias", False))


def _always(config: Config) -> bool:
    return True


def _never(config: Config) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Family:
    """How one family reads its `config.json`."""

    name: str
    qkv_bias: Callable[[Config], bool] = _never
    output_bias: Callable[[Config], bool] = _never  # of the attention's output projection
    mlp_bias: bool = False  # whether `mlp_bias` is looked at
    qk_norm: bool = False  # queries and keys are normalised head by head
    windows: Callable[[Config], list[int]] = _no_window  # positions seen, a layer; 0: all
    head_dim: int | None = None  # where the configuration is silent; None: hidden / heads


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
        qk_norm=True,
        windows=_upper_layers,
        head_dim=128,
    ),
}
"""By the architecture's name in `config.json`."""
