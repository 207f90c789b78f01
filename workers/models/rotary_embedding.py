"""Computes the frequencies of rotary embedding, including scaling for longer contexts."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.workers.models.rope_config import RopeSpec


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding of one or more layers; rotates the first R features of each head."""

    frequencies: Tensor  # [R / 2] float32: radians per position of each pair of features
    scale: float  # factor of the rotated features
    interleaved: bool  # pairs: adjacent features if True, features R / 2 apart if False


def make_rotary(rope: RopeSpec, head_dim: int, device: torch.device) -> Rotary:
    # Compute on the CPU, because arithmetic on `meta` tensors loads torch's compiler (seconds).
    frequencies = rotary_frequencies(rope, int(head_dim * rope.rotated_fraction))
    return Rotary(frequencies.to(device), rope.scale, rope.interleaved)


def rotary_frequencies(rope: RopeSpec, num_features: int) -> Tensor:
    """Return the radians per position of each pair of features, [num_features / 2] float32."""
    exponents = torch.arange(0, num_features, 2, dtype=torch.float32) / num_features
    frequencies = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, frequencies)
    if rope.kind == "yarn":
        return _yarn(rope, frequencies)
    if rope.kind == "longrope":
        return frequencies / torch.tensor(rope.divisors, dtype=torch.float32)
    return frequencies


def _llama3(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Divide low frequencies by `factor`, keep high ones; interpolate linearly between the two."""
    rotations = rope.original_max_len * frequencies / (2 * math.pi)
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / rope.factor + blend * frequencies


def _yarn(rope: RopeSpec, frequencies: Tensor) -> Tensor:
    """Scale the frequencies as in `_llama3`, but interpolate linearly in the index of the pair.

    The interpolation runs from the pair with `beta_fast` rotations to the pair with `beta_slow`
    rotations.
    """
    num_features = 2 * len(frequencies)
    low = _pair_of_rotations(rope, num_features, rope.beta_fast)
    high = _pair_of_rotations(rope, num_features, rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, num_features - 1)
    pairs = torch.arange(len(frequencies), dtype=torch.float32)
    stretched = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    return (1 - stretched) * frequencies + stretched * frequencies / rope.factor


def _pair_of_rotations(rope: RopeSpec, num_features: int, rotations: float) -> float:
    """Return the index of the pair with `rotations` full turns in `original_max_len` positions."""
    ratio = rope.original_max_len / (rotations * 2 * math.pi)
    return num_features * math.log(ratio) / (2 * math.log(rope.theta))
