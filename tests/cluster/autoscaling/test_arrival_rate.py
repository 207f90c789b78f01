"""Arrivals: their rate lately and on the whole, and the largest burst, against every stretch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.autoscaling.arrival_rate import BURST_SECONDS, ArrivalRate, Rates


def counted(*told: tuple[float, int]) -> ArrivalRate:
    arrivals = ArrivalRate(30.0)
    for now, total in told:
        arrivals.count(now, total)
    return arrivals


def test_of_nothing() -> None:
    assert counted((0, 7)).rates(60.0) == (0.0, 0.0, 0.0), "what came before is not known"


def test_the_stretch_that_needs_most_counts() -> None:
    told = ((0, 0), (10, 100), (15, 600), (20, 900), (30, 900))
    assert counted(*told).rates(60.0) == Rates(30.0, 30.0, 100.0), "five seconds, in which 500 came"
    assert counted(*told).rates(10.0).burst == 80.0, "ten seconds, in which 800 came"


def test_lately_is_a_window_and_the_usual_all_that_is_remembered() -> None:
    told = [(5 * step, 50 * step) for step in range(21)]
    told += [(5 * step, 1000) for step in range(21, 41)]
    assert counted(*told).rates(200.0) == Rates(0.0, 5.0, 10.0)
    assert counted(*told).rates(100.0) == Rates(0.0, 0.0, 10.0)
    assert counted(*told).rates(99.0).burst < 10.0


def test_a_moment_is_no_burst() -> None:
    assert counted((0, 0), (0.1, 100)).rates(60.0).burst == 100 / BURST_SECONDS


def test_a_count_that_began_anew_keeps_what_was_seen() -> None:
    rates = counted((0, 0), (5, 500), (10, 20), (15, 80)).rates(60.0)
    assert rates == Rates(560 / 15, 560 / 15, 100.0)


@given(
    st.lists(st.tuples(st.floats(0.1, 20), st.integers(0, 1000)), min_size=1, max_size=30),
    st.floats(1, 100),
)
def test_a_burst_is_the_most_of_all_stretches(
    steps: list[tuple[float, int]], memory: float
) -> None:
    times, totals = [0.0], [0]
    for seconds, tokens in steps:
        times.append(times[-1] + seconds)
        totals.append(totals[-1] + tokens)
    sizes = []
    for end, now in enumerate(times):
        if now >= times[-1] - memory:
            # The first one that is as old as the window is the last that counts.
            old = [each for each in range(end) if times[each] <= now - 30.0]
            sizes += [
                (totals[end] - totals[start]) / max(now - times[start], BURST_SECONDS)
                for start in range(old[-1] if old else 0, end + 1)
            ]
    found = counted(*zip(times, totals, strict=True)).rates(memory)
    assert found.burst == pytest.approx(max(sizes))
