"""Rotary embedding as a configuration describes it, without torch."""

from dataclasses import dataclass

from penstock.workers.models.config import Fields


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: its base, and how frequencies are stretched for longer contexts."""

    theta: float
    kind: str = "default"  # "default", "linear" or "llama3"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # this and what follows: llama3
    high_freq_factor: float = 4.0
    original_max_len: int = 8192


def read_rope(config: Fields) -> RopeSpec:
    """Both ways of writing it: `rope_parameters`, and the older `rope_theta` + `rope_scaling`."""
    values = config.values
    found = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise config.bad("rope_scaling", "an object")
    if any(isinstance(value, dict) for value in found.values()):
        raise config.unsupported("rope parameters that differ between layers are not served")
    merged = {"rope_theta": values.get("rope_theta") or 10000.0, **found}
    rope = Fields(merged, config.path)
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
