"""The search for the highest rate at which a server meets its goals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.loadtests.bench.sweep.rate_search import MAX_STEPS, MIN_RATIO, RateSearch


def played(first: float, precision: float, capacity: float) -> RateSearch:
    """Run and return a search, for a server that meets its goals up to the rate `capacity`."""
    search = RateSearch(first, precision)
    while (rate := search.next_rate()) is not None:
        search.record(rate, rate <= capacity)
    return search


@given(
    first=st.floats(0.01, 100),
    factor=st.floats(MIN_RATIO * 2.01, 1000),
    precision=st.floats(1.02, 2),
)
def test_knee_is_at_most_the_capacity_and_within_the_precision(
    first: float, factor: float, precision: float
) -> None:
    capacity = first * factor
    search = played(first, precision, capacity)
    assert search.knee is not None
    assert capacity / precision <= search.knee * 1.000001 <= capacity * 1.000001
    assert len(search.kept) + len(search.missed) <= MAX_STEPS


def test_server_without_capacity_has_no_knee() -> None:
    search = played(64.0, 1.1, 0.0)
    assert search.knee is None
    assert min(search.missed) == pytest.approx(64 * MIN_RATIO)


@given(st.data(), st.floats(1.01, 2))
def test_search_ends_whatever_the_server_does(data: st.DataObject, precision: float) -> None:
    search = RateSearch(1.0, precision)
    for _ in range(MAX_STEPS):
        if (rate := search.next_rate()) is None:
            break
        assert rate > 0
        assert rate not in search.kept + search.missed
        search.record(rate, data.draw(st.booleans()))
    assert search.next_rate() is None
    assert search.knee is None or search.knee < min(search.missed, default=float("inf"))
