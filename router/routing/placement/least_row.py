"""Search for the smallest element of an array, which is fast for small and for large arrays."""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from penstock.router.routing.placement.fleet import Floats

MAX_LIST_WORKERS = 48
"""Up to this many elements, operations on lists are faster than operations on arrays."""


def least_of(values: Floats) -> float:
    """Return the smallest element."""
    if len(values) <= MAX_LIST_WORKERS:
        smallest: float = min(values.tolist())
        return smallest
    return values.item(values.argmin())


def least_row(
    costs: Floats,
    ties: Sequence[Floats],
    fits: Callable[[int], bool],
    might_fit: Callable[[], npt.NDArray[np.bool_]],
) -> int:
    """Return the row with the lowest (cost, ties) of those that fit; -1 if none fits.

    Args:
        costs: the costs [n]; infinity: not a candidate.
        ties: arrays [n] that order rows of equal cost; no two rows have the same elements in all.
        fits: returns whether the worker of a row may be chosen.
        might_fit: returns False for rows that do not fit, and may return True for such rows.
    """
    if len(costs) <= MAX_LIST_WORKERS:
        return _least_of_few(costs.tolist(), ties, fits)
    rest = costs
    while True:
        row = int(rest.argmin())
        least = rest.item(row)
        if least == inf:
            return -1
        equal = (rest == least).nonzero()[0]
        if len(equal) > 1:
            row = _first(equal, ties)
        if fits(row):
            return row
        if rest is costs:  # perhaps most workers are full
            rest = np.where(might_fit(), costs, inf)
        rest[row] = inf


def _least_of_few(costs: list[float], ties: Sequence[Floats], fits: Callable[[int], bool]) -> int:
    while costs and (least := min(costs)) < inf:
        row = costs.index(least)
        if costs.count(least) > 1:
            equal = [row for row, cost in enumerate(costs) if cost == least]
            row = min(equal, key=lambda row: [tie.item(row) for tie in ties])
        if fits(row):
            return row
        costs[row] = inf
    return -1


def _first(rows: npt.NDArray[np.intp], ties: Sequence[Floats]) -> int:
    """Return the first of several rows in the order of `ties`."""
    for tie in ties:
        values = tie[rows]
        rows = rows[values == values.min()]
        if len(rows) == 1:
            break
    return int(rows[0])
