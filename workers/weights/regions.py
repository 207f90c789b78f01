"""Types that describe which part of a tensor a rank holds. This module does not import torch."""

from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges [first, last) of one dimension, concatenated in this order."""

Region: TypeAlias = tuple[Ranges | None, ...]
"""Selected ranges of each dimension; None selects all, as do missing entries at the end."""
