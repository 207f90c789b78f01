"""Search for the smallest element of an array.

It is fast for small and for large arrays.
"""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np
import numpy.typing as npt

from penstock.router.routing.placement.fleet import Floats

MAX_LIST_WORKERS = 48
"""Up to this many elements, operations on lists are faster than operations on arrays."""


def least_of(values: Floats) -> float:
    """Return the smallest element of an array, in less time than the method `min`."""
    return values.item(values.argmin())


def least_row(
    costs: Floats,
    ties: Sequence[Floats],
    fits: Callable[[int], bool],
    might_fit: Callable[[], npt.NDArray[np.bool_] | None],
) -> int:
    """Return the row with the lowest cost among those that fit, or -1 if none fits.

    Ties between rows of equal cost are broken by `ties`.

    Args:
        costs: the costs [n]; rows with infinite cost are not candidates.
        ties: arrays [n] that order rows of equal cost; rows differ in at least one array.
        fits: returns whether the worker of a row may be chosen.
        might_fit: returns a mask [n] that is False only for rows that do not fit, or None if any
            row might fit. It is called only if the row of lowest cost does not fit.
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
        for tie in ties:
            if len(equal) == 1:
                break
            values = tie[equal]
            # `argmin` takes less time than `min`.
            equal = equal[values == values.item(values.argmin())]
        row = int(equal[0])
        if fits(row):
            return row
        if rest is costs:
            able = might_fit()
            rest = costs.copy() if able is None else np.where(able, costs, inf)
        rest[row] = inf


def _least_of_few(costs: list[float], ties: Sequence[Floats], fits: Callable[[int], bool]) -> int:
    while costs and (least := min(costs)) < inf:
        row = costs.index(least)
        if costs.count(least) > 1:
            equal = [row for row, cost in enumerate(costs) if cost == least]
            for tie in ties:
                values = [tie.item(row) for row in equal]
                first = min(values)
                if values.count(first) == 1:
                    row = equal[values.index(first)]
                    break
                equal = [row for row, value in zip(equal, values, strict=True) if value == first]
        if fits(row):
            return row
        costs[row] = inf
    return -1
