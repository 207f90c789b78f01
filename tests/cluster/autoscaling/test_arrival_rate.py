"""Recent and average arrival rates, and the largest burst, checked against all intervals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.autoscaling.arrival_rate import BURST_SECONDS, ArrivalRate, Rates


def counted(*samples: tuple[float, int]) -> ArrivalRate:
    arrivals = ArrivalRate(30.0)
    for now, total in samples:
        arrivals.count(now, total)
    return arrivals


def test_rates_are_zero_after_one_sample() -> None:
    assert counted((0, 7)).rates(60.0) == (0.0, 0.0, 0.0), "earlier arrivals are not known"


def test_burst_is_the_interval_with_the_highest_rate() -> None:
    samples = ((0, 0), (10, 100), (15, 600), (20, 900), (30, 900))
    assert counted(*samples).rates(60.0) == Rates(30.0, 30.0, 100.0), "500 in 5 s"
    assert counted(*samples).rates(10.0).burst == 80.0, "800 in 10 s"


def test_recent_rate_covers_the_window_and_average_the_whole_memory() -> None:
    samples = [(5 * step, 50 * step) for step in range(21)]
    samples += [(5 * step, 1000) for step in range(21, 41)]
    assert counted(*samples).rates(200.0) == Rates(0.0, 5.0, 10.0)
    assert counted(*samples).rates(100.0) == Rates(0.0, 0.0, 10.0)
    assert counted(*samples).rates(99.0).burst < 10.0


def test_short_interval_is_averaged_over_the_shortest_burst() -> None:
    assert counted((0, 0), (0.1, 100)).rates(60.0).burst == 100 / BURST_SECONDS


def test_restarted_count_keeps_the_earlier_arrivals() -> None:
    rates = counted((0, 0), (5, 500), (10, 20), (15, 80)).rates(60.0)
    assert rates == Rates(560 / 15, 560 / 15, 100.0)


@given(
    st.lists(st.tuples(st.floats(0.1, 20), st.integers(0, 1000)), min_size=1, max_size=30),
    st.floats(1, 100),
)
def test_burst_is_the_maximum_over_all_intervals(
    steps: list[tuple[float, int]], memory: float
) -> None:
    times, totals = [0.0], [0]
    for seconds, tokens in steps:
        times.append(times[-1] + seconds)
        totals.append(totals[-1] + tokens)
    sizes = []
    for end, now in enumerate(times):
        if now >= times[-1] - memory:
            # Intervals start at samples in the window, or at the newest sample before the window.
            old = [each for each in range(end) if times[each] <= now - 30.0]
            sizes += [
                (totals[end] - totals[start]) / max(now - times[start], BURST_SECONDS)
                for start in range(old[-1] if old else 0, end + 1)
            ]
    found = counted(*zip(times, totals, strict=True)).rates(memory)
    assert found.burst == pytest.approx(max(sizes))
