"""Types of the part of a tensor that a rank holds; needs no torch."""

from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges [first, last) of one dimension, concatenated in this order."""

Region: TypeAlias = tuple[Ranges | None, ...]
"""Selected ranges per dimension; None, or a missing entry at the end, selects all."""
