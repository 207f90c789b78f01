"""Reads the parameters of rotary position embedding (RoPE) from `config.json`; needs no torch."""

import math
from dataclasses import dataclass, replace

from penstock.workers.models.config import Fields

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: its base, and the scaling of its frequencies for longer contexts.

    "dynamic" is read as "default", because "dynamic" scales only beyond the model's maximum length.
    """

    theta: float
    kind: str = "default"  # "default", "linear", "llama3", "yarn" or "longrope"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only
    high_freq_factor: float = 4.0  # llama3 only
    original_max_len: int = 8192  # context length of the original training
    # fraction of a head's features that is rotated, counted from the first feature
    rotated_fraction: float = 1.0
    scale: float = 1.0  # factor of the rotated features
    # rotated pairs: adjacent features if True, features half a head apart if False
    interleaved: bool = False
    beta_fast: float = 32.0  # yarn only
    beta_slow: float = 1.0  # yarn only
    truncate: bool = True  # yarn only
    divisors: tuple[float, ...] = ()  # longrope: divisor of each pair's frequency
    # longrope: divisors for sequences of up to `original_max_len` positions
    short_divisors: tuple[float, ...] = ()

    def within(self, num_positions: int) -> "RopeSpec":
        """Return the spec to use if sequences have at most `num_positions` positions."""
        if num_positions > self.original_max_len or not self.short_divisors:
            return self
        return replace(self, divisors=self.short_divisors)


def read_ropes(
    config: Fields, partial: bool, local_theta: float | None
) -> tuple[RopeSpec, RopeSpec | None]:
    """Return the RoPE of the model, and that of layers with a window (None: the model's RoPE).

    Only families with a `local_theta`, the default base of those layers, have a second rope.
    """
    if local_theta is None:
        return read_rope(config, partial), None
    values = dict(config.values)
    found = values.get("rope_parameters")
    if isinstance(found, dict) and "full_attention" in found:
        common = {key: value for key, value in values.items() if not key.startswith("rope_")}
        full, local = (
            Fields({**common, "rope_parameters": found.get(key)}, config.path)
            for key in ("full_attention", "sliding_attention")
        )
        return read_rope(full, partial), read_rope(local, partial)
    theta = config.number("rope_local_base_freq", local_theta)
    return read_rope(config, partial), RopeSpec(theta)


def read_rope(config: Fields, partial: bool = False) -> RopeSpec:
    """Read `rope_parameters`, or the older keys `rope_theta` and `rope_scaling`.

    Args:
        partial: whether the model family supports `partial_rotary_factor`.
    """
    values = config.values
    key = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    found = values.get(key) or {}
    if not isinstance(found, dict):
        raise config.bad(key, "an object")
    if any(isinstance(value, dict) for value in found.values()):
        raise config.unsupported(
            f"{key} has different parameters for different layers, which is not supported"
        )
    fraction = values.get("partial_rotary_factor")
    merged = {
        "rope_theta": values.get("rope_theta") or 10000.0,
        "partial_rotary_factor": 1.0 if fraction is None else fraction,
        **found,
    }
    rope = Fields(merged, config.path)
    if merged["partial_rotary_factor"] != 1.0 and not partial:
        raise config.unsupported(
            f"partial_rotary_factor {merged['partial_rotary_factor']!r} is not supported for this "
            "architecture: expected 1"
        )
    plain = RopeSpec(
        rope.number("rope_theta", 10000.0),
        rotated_fraction=rope.number("partial_rotary_factor", 1.0),
    )
    kind = found.get("rope_type", found.get("type", "default"))
    # in older files, "su", and "yarn" with `long_factor`, mean longrope
    if kind == "su" or (kind == "yarn" and "long_factor" in found):
        kind = "longrope"
    if kind not in KINDS:
        raise config.unsupported(
            f"rope_type {kind!r:.80} is not supported: expected one of {', '.join(KINDS)}"
        )
    if kind in ("default", "dynamic"):
        return plain
    return _stretched(config, rope, replace(plain, kind=kind))


def _stretched(config: Fields, rope: Fields, plain: RopeSpec) -> RopeSpec:
    kind, longest = plain.kind, config.size("max_position_embeddings")
    # A value at the top level (Phi-3) takes precedence over a value in the rope parameters.
    holder = config if config.values.get("original_max_position_embeddings") else rope
    original = holder.size("original_max_position_embeddings", longest)
    factor = rope.values.get("factor")
    if factor is None and kind in ("yarn", "longrope"):
        factor = longest / original
    if factor is None:
        raise rope.bad("factor", f"a number, because rope_type is {kind!r}")
    if type(factor) not in (int, float) or not 0 < factor < float("inf"):
        raise rope.bad("factor", "a positive, finite number")
    spec = replace(plain, factor=float(factor))
    if kind == "linear":
        return spec
    spec = replace(spec, original_max_len=original)
    return {"llama3": _llama3, "yarn": _yarn, "longrope": _longrope}[kind](rope, spec, longest)


def _llama3(rope: Fields, spec: RopeSpec, longest: int) -> RopeSpec:
    low, high = rope.number("low_freq_factor", 1.0), rope.number("high_freq_factor", 4.0)
    if low >= high:
        raise rope.bad("low_freq_factor", f"a number below high_freq_factor ({high:g})")
    return replace(spec, low_freq_factor=low, high_freq_factor=high)


def _yarn(rope: Fields, spec: RopeSpec, longest: int) -> RopeSpec:
    """Read YaRN parameters (Peng et al., 2023). Only DeepSeek has `mscale` and `mscale_all_dim`."""
    scale = _yarn_scale(spec.factor, 1.0)
    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        scale = _yarn_scale(spec.factor, rope.number("mscale", 1.0)) / _yarn_scale(
            spec.factor, rope.number("mscale_all_dim", 1.0)
        )
    # vLLM multiplies by `attn_factor` (DeepSeek-R1-0528-Qwen3-8B); transformers ignores this key.
    if rope.values.get("attn_factor") is not None:
        scale *= rope.number("attn_factor", 1.0)
    return replace(
        spec,
        scale=_attention_factor(rope, scale),
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        truncate=bool(rope.values.get("truncate", True)),
    )


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def stretched_scores(config: Fields) -> float:
    """Return DeepSeek's YaRN multiplier of attention scores; 1.0 without `mscale_all_dim`."""
    found = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default" or not found.get("mscale_all_dim"):
        return 1.0
    rope = Fields(found, config.path)
    factor, weight = rope.number("factor", 1.0), rope.number("mscale_all_dim", 1.0)
    return _yarn_scale(factor, weight) ** 2


def _longrope(rope: Fields, spec: RopeSpec, longest: int) -> RopeSpec:
    """Read LongRoPE parameters (Ding et al., 2024).

    Sequences of all lengths use the same divisors, so that they can share cached keys.
    """
    scale = 1.0
    if spec.factor > 1:
        scale = math.sqrt(1 + math.log(spec.factor) / math.log(spec.original_max_len))
    return replace(
        spec,
        scale=_attention_factor(rope, scale),
        divisors=_divisors(rope, "long_factor"),
        short_divisors=_divisors(rope, "short_factor"),
    ).within(longest)


def _divisors(rope: Fields, key: str) -> tuple[float, ...]:
    found = rope.values.get(key)
    if not isinstance(found, list) or not all(
        type(value) in (int, float) and value > 0 for value in found
    ):
        raise rope.bad(key, "a list of positive numbers, one per pair of rotated features")
    return tuple(found)


def _attention_factor(rope: Fields, default: float) -> float:
    given = rope.values.get("attention_factor")
    return default if given is None else rope.number("attention_factor", default)
