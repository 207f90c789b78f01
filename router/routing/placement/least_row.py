"""Search for the worker of lowest cost that scores only a few workers exactly.

Uses the stopping rule of the threshold algorithm (Fagin, Lotem and Naor, 2001): workers are visited
in order of a lower bound of their cost, until no other worker can have a lower cost.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

from penstock.router.routing.placement.fleet import Floats

NUM_TRIES = 8
"""Number of workers that are visited before all costs are computed by array operations."""
MAX_LIST_WORKERS = 48
"""Up to this many workers, operations on a list of bounds are faster than operations on arrays."""


def least_row(
    bounds: Floats,
    offset: float,
    ties: Sequence[Floats],
    fits: Callable[[int], bool],
    few: Mapping[int, float],
    cost: Callable[[int], float] | None = None,
) -> int | None:
    """Return the row with the lowest (cost, ties, row) of those that fit.

    Args:
        bounds: lower bounds of the costs, minus `offset` [n]; infinity: not a candidate.
        offset: the same for all rows. It saves an operation on arrays.
        ties: arrays [n] that order rows of equal cost.
        fits: returns whether the worker of a row may be chosen.
        few: costs of rows that may be below their bounds. The rows must be candidates.
        cost: returns the exact cost of a row; None: the bounds are exact.

    Returns:
        The row; -1 if no row fits; None if more than `NUM_TRIES` rows would have to be visited.
    """
    row, lowest = -1, inf
    for each, exact in few.items():
        if (exact < lowest or (exact == lowest and _precedes(each, row, ties))) and fits(each):
            row, lowest = each, exact
    is_list = len(bounds) <= MAX_LIST_WORKERS + 1
    rest: Floats | list[float] = bounds.tolist() if is_list else bounds
    for _ in range(len(rest) if is_list else NUM_TRIES):
        least = min(rest) if isinstance(rest, list) else rest.item(rest.argmin())
        bound = least + offset
        if bound > lowest or bound == inf:
            return row
        each = _first(rest, least, ties)
        if bound == lowest and _precedes(row, each, ties):
            return row
        exact = bound if cost is None else cost(each)
        if (exact < lowest or (exact == lowest and _precedes(each, row, ties))) and fits(each):
            row, lowest = each, exact
            if exact == bound:
                return row
        if rest is bounds:
            rest = bounds.copy()
        rest[each] = inf
    return row if is_list else None


def least_of(bounds: Floats) -> float:
    """Return the smallest element."""
    if len(bounds) <= MAX_LIST_WORKERS + 1:
        smallest: float = min(bounds.tolist())
        return smallest
    return bounds.item(bounds.argmin())


def first_fitting(costs: Floats, ties: Sequence[Floats], fits: Callable[[int], bool]) -> int:
    """Return the row with the lowest (cost, ties, row) of those that fit; -1 if none fits.

    Args:
        costs: exact costs [n]; infinity: not a candidate. Overwritten.
        ties: arrays [n] that order rows of equal cost.
        fits: returns whether the worker of a row may be chosen.
    """
    while True:
        least = costs.item(costs.argmin())
        if least == inf:
            return -1
        row = _first(costs, least, ties)
        if fits(row):
            return row
        costs[row] = inf


def _first(costs: Floats | list[float], least: float, ties: Sequence[Floats]) -> int:
    """Return the first row, in the order of `ties`, of those with the cost `least`."""
    if isinstance(costs, list):
        if costs.count(least) == 1:
            return costs.index(least)
        rows = [row for row, cost in enumerate(costs) if cost == least]
        return min(rows, key=lambda row: (*[tie.item(row) for tie in ties], row))
    equal = (costs == least).nonzero()[0]
    for tie in ties:
        if len(equal) == 1:
            break
        values = tie[equal]
        equal = equal[values == values.min()]
    return int(equal[0])


def _precedes(row: int, other: int, ties: Sequence[Floats]) -> bool:
    """Return whether a row comes before another row of the same cost."""
    own = [tie.item(row) for tie in ties], row
    return own < ([tie.item(other) for tie in ties], other)
