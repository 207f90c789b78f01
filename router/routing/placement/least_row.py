"""Search for the worker of lowest cost that scores only a few workers exactly.

Uses the stopping rule of the threshold algorithm (Fagin, Lotem and Naor, 2001): workers are visited
in order of a lower bound of their cost, until no other worker can have a lower cost.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf

from penstock.router.routing.placement.fleet import Floats

NUM_TRIES = 8
"""Number of workers that are visited before all costs are computed by array operations."""
MAX_LIST_WORKERS = 48
"""Up to this many workers, a loop over their bounds is faster than operations on arrays."""


def least_row(
    bounds: Floats,
    ties: Sequence[Floats],
    fits: Callable[[int], bool],
    few: Iterable[int] = (),
    cost: Callable[[int], float] | None = None,
) -> int | None:
    """Return the row with the lowest (cost, ties, row) of those that fit.

    Args:
        bounds: lower bounds of the costs [n]; infinity: not a candidate. Overwritten.
        ties: arrays [n] that order rows of equal cost.
        fits: returns whether the worker of a row may be chosen.
        few: rows whose costs may be below their bounds. They must be candidates.
        cost: returns the exact cost of a row; None: the bounds are exact.

    Returns:
        The row; -1 if no row fits; None if more than `NUM_TRIES` rows would have to be visited.
    """
    best: tuple[float, ...] | None = None
    row = -1
    for each in few:
        assert cost is not None
        key = (cost(each), *[tie.item(each) for tie in ties], each)
        if (best is None or key < best) and fits(each):
            best, row = key, each
    if len(bounds) <= MAX_LIST_WORKERS + 1:
        return _scan(bounds, ties, fits, cost, best, row)
    for _ in range(NUM_TRIES):
        least = _first(bounds, ties)
        bound = bounds.item(least)
        if bound == inf:
            return row
        rest = (*[tie.item(least) for tie in ties], least)
        if best is not None and best <= (bound, *rest):
            return row
        exact = bound if cost is None else cost(least)
        key = (exact, *rest)
        if (best is None or key < best) and fits(least):
            best, row = key, least
            if exact == bound:
                return row
        bounds[least] = inf
    return None


def _scan(
    bounds: Floats,
    ties: Sequence[Floats],
    fits: Callable[[int], bool],
    cost: Callable[[int], float] | None,
    best: tuple[float, ...] | None,
    row: int,
) -> int:
    """Return the result of `least_row`, given the best of the few rows: visit all rows in order."""
    lowest = inf if best is None else best[0]
    for each, bound in enumerate(bounds.tolist()):
        if bound > lowest or bound == inf:
            continue
        exact = bound if cost is None else cost(each)
        if exact > lowest:
            continue
        key = (exact, *[tie.item(each) for tie in ties], each)
        if (best is None or key < best) and fits(each):
            best, row, lowest = key, each, exact
    return row


def first_fitting(costs: Floats, ties: Sequence[Floats], fits: Callable[[int], bool]) -> int:
    """Return the row with the lowest (cost, ties, row) of those that fit; -1 if none fits.

    Args:
        costs: exact costs [n]; infinity: not a candidate. Overwritten.
        ties: arrays [n] that order rows of equal cost.
        fits: returns whether the worker of a row may be chosen.
    """
    while True:
        row = _first(costs, ties)
        if costs.item(row) == inf:
            return -1
        if fits(row):
            return row
        costs[row] = inf


def _first(costs: Floats, ties: Sequence[Floats]) -> int:
    row = int(costs.argmin())
    equal = (costs == costs[row]).nonzero()[0]
    for tie in ties:
        if len(equal) == 1:
            break
        values = tie[equal]
        equal = equal[values == values.min()]
    return int(equal[0])
