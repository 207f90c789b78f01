"""Deterministic hashing for rankings, so that the same events give the same placements."""

from functools import lru_cache
from zlib import crc32

MASK = 2**64 - 1


def mix(number: int) -> int:
    """Return a 64-bit number that looks random (the finalizer of SplitMix64)."""
    number = (number + 0x9E3779B97F4A7C15) & MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & MASK
    return number ^ (number >> 31)


@lru_cache(maxsize=4096)
def name_hash(name: str) -> int:
    """Return a 64-bit hash of a worker's name that is the same in every process."""
    return mix(crc32(name.encode()))
