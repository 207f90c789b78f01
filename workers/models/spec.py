"""What a checkpoint folder says of its model: read from `config.json`, without torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.workers.models.families import FAMILIES, Config, Family

MAX_JSON_BYTES = 64 << 20
MAX_SIZE = 1 << 24  # of any one dimension; what is beyond is not a model


class BadCheckpoint(ValueError):
    """The folder is not a whole and sound checkpoint; the message says what to do."""


class UnsupportedModel(ValueError):
    """A sound checkpoint of something that is not served; the message names it."""


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: its base, and how frequencies are stretched for longer contexts."""

    theta: float
    kind: str = "default"  # "default", "linear" or "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this and what follows: llama3
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything the decoder needs to know of a model."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int  # positions
    eos_tokens: tuple[int, ...]
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    norm_eps: float
    rope: RopeSpec
    windows: tuple[int, ...]  # positions that a layer's token sees, itself included; 0: all
    dtype: str  # of the checkpoint: float32, bfloat16 or float16

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Bytes of keys and values that one position takes, all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype_bytes


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size; `BadCheckpoint` if it is not one."""
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise BadCheckpoint(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB: not read")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise BadCheckpoint(f"{path} is not valid JSON ({error}): download it again") from None
    if not isinstance(value, dict):
        raise BadCheckpoint(f"{path} holds no JSON object: download it again")
    return value


def read_spec(folder: Path) -> ModelSpec:
    """What the folder's `config.json` (and `generation_config.json`, for the end tokens) says.

    Raises `BadCheckpoint` or `UnsupportedModel`, each with a line for the user.
    """
    if not folder.is_dir():
        raise BadCheckpoint(f"{folder} is not a folder: give the path of a checkpoint folder")
    if not (folder / "config.json").is_file():
        raise BadCheckpoint(f"{folder} has no config.json: give the path of a checkpoint folder")
    config = _Fields(read_json(folder / "config.json"), folder / "config.json")
    return _build(config, _family(config), _eos_tokens(folder, config))


class _Fields:
    """A configuration whose values are checked as they are read."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values: Config = values
        self.path = path

    def bad(self, key: str, wanted: str) -> BadCheckpoint:
        return BadCheckpoint(f"{self.path}: {key} is {self.values.get(key)!r}, not {wanted}")

    def unsupported(self, what: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path}: {what}")

    def size(self, key: str, default: int | None = None) -> int:
        """A positive whole number; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            value = default
        if type(value) is not int or not 0 < value <= MAX_SIZE:
            raise self.bad(key, "a positive whole number")
        return value

    def number(self, key: str, default: float) -> float:
        value = self.values.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.bad(key, "a positive number")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False)
        if type(value) is not bool:
            raise self.bad(key, "true or false")
        return value


def _family(config: _Fields) -> Family:
    values = config.values
    known = ", ".join(sorted(FAMILIES))
    architectures = values.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise config.unsupported(f"names no single architecture; served are {known}")
    family = FAMILIES.get(str(architectures[0]))
    if family is None:
        raise config.unsupported(f"{architectures[0]} is not served; served are {known}")
    if values.get("auto_map"):
        raise config.unsupported("auto_map asks for code from the checkpoint, which is never run")
    if values.get("quantization_config"):
        method = values["quantization_config"]
        name = method.get("quant_method") if isinstance(method, Mapping) else method
        raise config.unsupported(f"weights quantized by {name} are not served: take the original")
    if values.get("hidden_act", "silu") != "silu":
        raise config.unsupported(f"hidden_act {values['hidden_act']!r} is not served, only 'silu'")
    return family


def _build(config: _Fields, family: Family, eos_tokens: tuple[int, ...]) -> ModelSpec:
    values = config.values
    hidden_size, num_heads = config.size("hidden_size"), config.size("num_attention_heads")
    num_kv_heads = config.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise config.bad("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    head_dim = config.size("head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise config.bad("head_dim", "even, which rotary embedding needs")
    return ModelSpec(
        family=family.name,
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=config.size("intermediate_size"),
        num_layers=config.size("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_model_len=config.size("max_position_embeddings"),
        eos_tokens=eos_tokens,
        tie_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=family.qkv_bias(values),
        output_bias=family.output_bias(values),
        mlp_bias=family.mlp_bias and config.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config),
        windows=_windows(config, family),
        dtype=_dtype(config),
    )


def _rope(config: _Fields) -> RopeSpec:
    """Both ways of writing it: `rope_parameters`, and the older `rope_theta` + `rope_scaling`."""
    values = config.values
    found = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise config.bad("rope_scaling", "an object")
    if any(isinstance(value, dict) for value in found.values()):
        raise config.unsupported("rope parameters that differ between layers are not served")
    merged = {"rope_theta": values.get("rope_theta") or 10000.0, **found}
    rope = _Fields(merged, config.path)
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise config.unsupported(
            f"rope scaling {kind!r} is not served; served are default, linear and llama3"
        )
    if merged.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise config.unsupported("partial_rotary_factor other than 1 is not served")
    theta = rope.number("rope_theta", 10000.0)
    if kind == "default":
        return RopeSpec(theta)
    if "factor" not in merged:
        raise rope.bad("factor", f"given, which rope scaling {kind!r} needs")
    factor = rope.number("factor", 1.0)
    if kind == "linear":
        return RopeSpec(theta, kind, factor)
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    if low >= high:
        raise rope.bad("low_freq_factor", f"below high_freq_factor ({high:g})")
    original = rope.size("original_max_position_embeddings", config.size("max_position_embeddings"))
    return RopeSpec(theta, kind, factor, low, high, original)


def _windows(config: _Fields, family: Family) -> tuple[int, ...]:
    try:
        windows = tuple(family.windows(config.values))
    except TypeError:
        raise config.bad("layer_types", "a list of the layers' kinds") from None
    if len(windows) != config.size("num_hidden_layers"):
        raise config.bad("layer_types", "one entry a layer")
    if any(type(window) is not int or window < 0 for window in windows):
        raise config.bad("sliding_window", "a positive whole number")
    return windows


def _dtype(config: _Fields) -> str:
    values = config.values
    name = str(values.get("dtype") or values.get("torch_dtype") or "float32")
    if name not in ("float32", "bfloat16", "float16"):
        raise config.unsupported(f"dtype {name!r} is not served: float32, bfloat16 or float16")
    return name


def _eos_tokens(folder: Path, config: _Fields) -> tuple[int, ...]:
    """Of `generation_config.json` where it names some, else of `config.json`."""
    found = None
    path = folder / "generation_config.json"
    if path.is_file():
        found = read_json(path).get("eos_token_id")
    if found is None:
        found, path = config.values.get("eos_token_id"), config.path
    tokens = [] if found is None else found if isinstance(found, list) else [found]
    if any(type(token) is not int or token < 0 for token in tokens):
        raise BadCheckpoint(f"{path}: eos_token_id is {found!r}, not token ids")
    return tuple(tokens)
