"""Reads from a model's configuration how far YaRN extends its context."""

from collections.abc import Mapping
from typing import Any

MAX_POSITIONS = 1 << 24  # larger numbers are ignored


def yarn_positions(config: Mapping[str, Any]) -> int:
    """Return the number of positions to which YaRN extends a model; 0 if the file names none.

    Model cards tell users to enable YaRN by adding `rope_scaling` to `config.json`, without a
    change of `max_position_embeddings`. As in vLLM, the number is then
    `original_max_position_embeddings` times `factor`.

    Args:
        config: the content of `config.json`. Invalid values are ignored.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(rope, Mapping):
        rope = rope.get("full_attention", rope)
    if not isinstance(rope, Mapping) or "long_factor" in rope:  # "yarn" may also mean longrope
        return 0
    key = "original_max_position_embeddings"
    original, factor = config.get(key) or rope.get(key), rope.get("factor")
    if rope.get("rope_type", rope.get("type")) != "yarn":
        return 0
    if type(original) is not int or not 0 < original <= MAX_POSITIONS:
        return 0
    if not isinstance(factor, int | float) or not 0 < original * factor <= MAX_POSITIONS:
        return 0
    return int(original * factor)
