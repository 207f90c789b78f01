"""Converts the metadata of a GGUF file to the `config.json` of the same model."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from struct import unpack
from typing import Any, TypeAlias

from penstock.common.gguf.checkpoint import GgufCheckpoint
from penstock.common.gguf.header import GgufArray
from penstock.common.gguf.metadata import shortest

Values: TypeAlias = dict[str, Any]

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
MAX_ROPE_FACTORS = 4096

# GGUF files of Gemma lack the scale of the attention scores, which is usually 1 / sqrt(head_dim).
# Gemma models with another scale are recognized by their number of layers, as in llama.cpp.
GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62


class _Reader:
    """Reads the metadata whose keys begin with the prefix of the model's architecture."""

    def __init__(self, checkpoint: GgufCheckpoint, prefix: str) -> None:
        self.metadata = checkpoint.metadata
        self.tensors = checkpoint.tensors
        self.prefix = prefix

    def key(self, name: str) -> str:
        return f"{self.prefix}.{name}"

    def has(self, name: str) -> bool:
        return self.metadata.get(self.key(name)) is not None

    def size(self, name: str, default: int | None = None) -> int:
        return self.metadata.uniform_size(self.key(name), default)

    def count(self, name: str) -> int:
        return self.metadata.count(self.key(name), 0)

    def number(self, name: str, default: float | None = None) -> float:
        return self.metadata.number(self.key(name), default)


@dataclass(frozen=True, slots=True)
class _Architecture:
    """The conversion of one GGUF architecture.

    Attributes:
        name: The name of the architecture in `config.json`.
        extra: Returns the values that only this architecture has.
        partial_rotary: Whether rotary embeddings may cover only a part of each head.
    """

    name: str
    extra: Callable[[_Reader, Values], Values]
    partial_rotary: bool = False


def _full_attention(reader: _Reader, values: Values) -> Values:
    """Return the values that say whether attention and MLP of a Llama or Qwen model have biases.

    Raises:
        UnsupportedModel: the model does not use full attention, because its sliding window is
            shorter than the context.
    """
    window = reader.count("attention.sliding_window")
    if 0 < window < values["max_position_embeddings"]:
        key = reader.key("attention.sliding_window")
        context = values["max_position_embeddings"]
        raise reader.metadata.unsupported(
            f"{key} is {window}: sliding windows are not supported for this architecture, expected "
            f"0 or at least the context length ({context})"
        )
    return {
        "attention_bias": "blk.0.attn_q.bias" in reader.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in reader.tensors,
    }


def _gemma2(reader: _Reader, values: Values) -> Values:
    return _gemma(reader, values, GEMMA2_27B_LAYERS)


def _gemma3(reader: _Reader, values: Values) -> Values:
    extra: Values = {"rope_local_base_freq": reader.number("rope.freq_base_swa", 10000.0)}
    pattern = reader.metadata.get(reader.key("attention.sliding_window_pattern"))
    if isinstance(pattern, GgufArray):
        kinds = ("full_attention", "sliding_attention")
        extra["layer_types"] = [kinds[bool(number)] for number in pattern.numbers()]
    elif pattern is not None:
        extra["sliding_window_pattern"] = reader.size("attention.sliding_window_pattern")
    return extra | _gemma(reader, values, GEMMA3_27B_LAYERS)


def _gemma(reader: _Reader, values: Values, layers_of_27b: int) -> Values:
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    is_27b = values["num_hidden_layers"] == layers_of_27b
    extra: Values = {
        "query_pre_attn_scalar": hidden // heads if is_27b else values["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
    }
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if reader.has(name):
            extra[name] = reader.number(name)
    if reader.has("attention.sliding_window"):
        extra["sliding_window"] = reader.size("attention.sliding_window")
    return extra


def _phi3(reader: _Reader, values: Values) -> Values:
    return {"sliding_window": reader.count("attention.sliding_window") or None}


ARCHITECTURES = {
    "llama": _Architecture("LlamaForCausalLM", _full_attention),
    "qwen2": _Architecture("Qwen2ForCausalLM", _full_attention),
    "qwen3": _Architecture("Qwen3ForCausalLM", _full_attention),
    "gemma2": _Architecture("Gemma2ForCausalLM", _gemma2),
    "gemma3": _Architecture("Gemma3ForCausalLM", _gemma3),
    "phi3": _Architecture("Phi3ForCausalLM", _phi3, partial_rotary=True),
}
"""The supported architectures, by the value of `general.architecture`."""


def read_config(checkpoint: GgufCheckpoint, eos_tokens: list[int]) -> Values:
    """Return the content of the `config.json` that describes the model of a GGUF file.

    Raises:
        BadCheckpoint: A value is missing or invalid.
        UnsupportedModel: The architecture or an entry that may change answers is not supported.
    """
    metadata = checkpoint.metadata
    prefix = metadata.text("general.architecture")
    architecture = ARCHITECTURES.get(prefix)
    if architecture is None:
        served = ", ".join(sorted(ARCHITECTURES))
        raise metadata.unsupported(
            f"general.architecture {prefix!r:.80} is not supported: expected one of {served}"
        )
    reader = _Reader(checkpoint, prefix)
    values = {
        "architectures": [architecture.name],
        "eos_token_id": eos_tokens,
        "torch_dtype": _dtype(checkpoint),
        "tie_word_embeddings": "output.weight" not in checkpoint.tensors,
        **_sizes(reader),
    }
    values |= _rope(reader, values, architecture.partial_rotary)
    values |= architecture.extra(reader, values)
    _check_neutral(reader)
    metadata.refuse_unread(f"{prefix}.", {reader.key("rope.scaling.finetuned")})
    return values


def _check_neutral(reader: _Reader) -> None:
    """Raise `UnsupportedModel` if an entry enables a feature that is not supported."""
    for name in ("expert_count", "expert_used_count", "pooling_type"):
        if reader.count(name):
            raise reader.metadata.unsupported(
                f"{reader.key(name)} is {reader.count(name)}; only 0 is supported"
            )
    if not reader.metadata.flag(reader.key("attention.causal"), True):
        key = reader.key("attention.causal")
        raise reader.metadata.unsupported(f"{key} is false; only true is supported")


def _sizes(reader: _Reader) -> Values:
    hidden, heads = reader.size("embedding_length"), reader.size("attention.head_count")
    head_dim = reader.size("attention.key_length", max(1, hidden // heads))
    if reader.size("attention.value_length", head_dim) != head_dim:
        raise reader.metadata.bad(
            reader.key("attention.value_length"), f"{head_dim}, the head dimension"
        )
    embeddings = reader.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise reader.metadata.unsupported("the file has no 2-dimensional tensor token_embd.weight")
    vocab_size = embeddings.shape[0]
    if reader.size("vocab_size", vocab_size) != vocab_size:
        raise reader.metadata.bad(
            reader.key("vocab_size"), f"{vocab_size}, the number of rows of token_embd.weight"
        )
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": reader.size("feed_forward_length"),
        "num_hidden_layers": reader.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": reader.size("context_length"),
        "rms_norm_eps": reader.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": reader.number("rope.freq_base", 10000.0),
    }


def _rope(reader: _Reader, values: Values, partial: bool) -> Values:
    head_dim = values["head_dim"]
    rotated = reader.size("rope.dimension_count", head_dim)
    if rotated > head_dim or (rotated != head_dim and not partial):
        allowed = f"at most {head_dim}" if partial else head_dim
        raise reader.metadata.bad(
            reader.key("rope.dimension_count"), f"{allowed}, the head dimension"
        )
    found: Values = {}
    if rotated != head_dim:
        fraction = rotated / head_dim
        while int(head_dim * fraction) < rotated:  # readers of config.json round the product down
            fraction = math.nextafter(fraction, 1.0)
        found["partial_rotary_factor"] = fraction
    scaling = _scaling(reader, values, rotated // 2)
    return found | ({"rope_scaling": scaling} if scaling else {})


def _scaling(reader: _Reader, values: Values, num_pairs: int) -> Values:
    kind = reader.metadata.text(reader.key("rope.scaling.type"), "linear")
    factor = reader.number("rope.scaling.factor", reader.number("rope.scale_linear", 1.0))
    length = "rope.scaling.original_context_length"
    original = reader.size(length, values["max_position_embeddings"])
    factors = [
        name for name in (ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS) if name in reader.tensors
    ]
    if factors:
        if kind not in ("linear", "longrope", "none") or (kind == "linear" and factor != 1.0):
            raise reader.metadata.unsupported(
                f"rope scaling {kind!r:.40} together with tensor {factors[0]} is not supported"
            )
        return _divisors(reader, original, num_pairs)
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise reader.metadata.unsupported(
            f"{reader.key('rope.scaling.type')} {kind!r:.40} is not supported: expected 'none', "
            f"'linear', 'yarn', or 'longrope' with the tensors {LONG_FACTORS} and {SHORT_FACTORS}"
        )
    found = {
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": reader.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": reader.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    if reader.has(length):  # only a length that the file names extends the context
        found["original_max_position_embeddings"] = original
    extra = reader.number("rope.scaling.attn_factor", 1.0)
    if extra != 1.0:  # the product with YaRN's default attention factor, as in llama.cpp
        found["attention_factor"] = extra * (1.0 + 0.1 * math.log(max(factor, 1.0)))
    return found


def _divisors(reader: _Reader, original: int, num_pairs: int) -> Values:
    """Return the rope scaling of a file that has tensors with a divisor of each frequency.

    Files of Llama 3 and of models with LongRoPE have such tensors.
    """
    common: Values = {"rope_type": "longrope"}
    if ROPE_FACTORS in reader.tensors:
        divisors = _tensor(reader, ROPE_FACTORS, num_pairs)
        both = {"long_factor": divisors, "short_factor": divisors}
        return common | both | {"attention_factor": 1.0}
    both = {
        "long_factor": _tensor(reader, LONG_FACTORS, num_pairs),
        "short_factor": _tensor(reader, SHORT_FACTORS, num_pairs),
    }
    if reader.has("rope.scaling.attn_factor"):
        common["attention_factor"] = reader.number("rope.scaling.attn_factor")
    return common | both | {"original_max_position_embeddings": original}


def _tensor(reader: _Reader, name: str, num_items: int) -> list[float]:
    """Return the items of a small tensor of type F32."""
    tensor = reader.tensors.get(name)
    if tensor is None or tensor.shape != (num_items,) or tensor.type.name != "F32":
        found = "absent" if tensor is None else f"{tensor.type.name} {list(tensor.shape)}"
        raise reader.metadata.unsupported(f"tensor {name} is {found}, expected F32 [{num_items}]")
    if num_items > MAX_ROPE_FACTORS:
        raise reader.metadata.unsupported(
            f"tensor {name} has {num_items} items; at most {MAX_ROPE_FACTORS} are supported"
        )
    with tensor.path.open("rb") as file:
        file.seek(tensor.start)
        items = list(unpack(f"<{num_items}f", file.read(tensor.num_bytes)))
    if not all(0 < item < math.inf for item in items):
        wrong = next(item for item in items if not 0 < item < math.inf)
        raise reader.metadata.unsupported(
            f"tensor {name} has the item {wrong:g}; all items must be positive, finite numbers"
        )
    return [shortest(item) for item in items]


def _dtype(checkpoint: GgufCheckpoint) -> str:
    """Return the dtype in which to load the model.

    The dtype is the type of the matrices if all matrices are F32 or all are F16, and bfloat16
    otherwise. The models were trained in bfloat16, and some of them overflow in float16.
    """
    kinds = {each.type.name for each in checkpoint.tensors.values() if len(each.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(" ".join(kinds), "bfloat16")
