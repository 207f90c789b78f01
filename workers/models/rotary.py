"""The frequencies of rotary embedding, as its kinds stretch them."""

import math

import torch
from torch import Tensor

from penstock.workers.models.rope import RopeSpec


def rotary_frequencies(rope: RopeSpec, head_dim: int) -> Tensor:
    """Radians a position of each feature pair: [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    return _llama3(rope, frequencies)


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Long waves are stretched, short ones kept, those between blended linearly."""
    turns = rope.original_max_len * frequencies / (2 * math.pi)
    blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies
