"""Types of the part of a tensor that a rank holds; needs no torch."""

from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges [first, last) of one dimension, concatenated in this order."""

Region: TypeAlias = tuple[Ranges | None, ...]
"""Selected ranges of each dimension; None selects all, as do missing entries at the end."""
