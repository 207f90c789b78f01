"""ALiBi (Press et al., 2022): linear biases that lower scores with distance, instead of RoPE."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AlibiSpec:
    """Slope of each query head: decrease of a score per position of distance.

    With `rounded` (Falcon), position j adds bfloat16(slope * j) to a score before it is scaled. The
    rounding makes this depend on the key's position, not only on the distance.
    """

    slopes: tuple[float, ...]
    rounded: bool = False


def alibi_slopes(num_heads: int, most: int = 8) -> tuple[float, ...]:
    """Return the ALiBi slopes of n heads: 2^(-most/n), 2^(-2 most/n), ..., 2^-most.

    If n is not a power of two, take n of the slopes of the next power of two: those at odd indices
    first, then those at even indices.
    """
    size = 1 << (num_heads - 1).bit_length()
    found = tuple(2.0 ** (-most * (head + 1) / size) for head in range(size))
    return found if size == num_heads else (found[1::2] + found[::2])[:num_heads]
