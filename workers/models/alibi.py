"""ALiBi (Press et al., 2022): biases that lower scores linearly with distance, instead of RoPE."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AlibiSpec:
    """Slope of each query head: for each position of distance, the score decreases by the slope.

    With `rounded` (Falcon), bfloat16(slope * j) is added to the score of position j before scores
    are scaled. Because of the rounding, results differ slightly from those with exact biases.
    """

    slopes: tuple[float, ...]
    rounded: bool = False


def alibi_slopes(num_heads: int, most: int = 8) -> tuple[float, ...]:
    """Return the ALiBi slopes of n heads: 2^(-most/n), 2^(-2 most/n), ..., 2^-most.

    If n is not a power of two, return n of the slopes of the next power of two: first the slopes at
    odd indices, then the slopes at even indices.
    """
    size = 1 << (num_heads - 1).bit_length()
    found = tuple(2.0 ** (-most * (head + 1) / size) for head in range(size))
    return found if size == num_heads else (found[1::2] + found[::2])[:num_heads]
