"""Attention with linear biases (Press et al., 2022): scores fall with the distance, and no head
turns."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AlibiSpec:
    """The slope of each query head: how much a score falls a position.

    rounded: as Falcon has it. What position j adds to a score is bfloat16(slope * j), before the
    score is scaled: a property of the key, and not of the distance alone.
    """

    slopes: tuple[float, ...]
    rounded: bool = False


def alibi_slopes(num_heads: int, most: int = 8) -> tuple[float, ...]:
    """2^-most/n, 2^-2most/n, ..., 2^-most of n heads; where n is no power of two, those of the next
    one that is, every second first."""
    size = 1 << (num_heads - 1).bit_length()
    found = tuple(2.0 ** (-most * (head + 1) / size) for head in range(size))
    return found if size == num_heads else (found[1::2] + found[::2])[:num_heads]
