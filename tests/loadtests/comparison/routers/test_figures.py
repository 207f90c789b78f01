import math

import pytest

from penstock.loadtests.comparison.routers.figures import (
    DIRECT,
    RateSearch,
    Sample,
    cpu_per_token,
    cpu_used,
    summary,
)


def sample(cpu: float, single: float = 0.001, burst: float = 0.01) -> Sample:
    return Sample(cpu, 0.02, 1.0, single, burst)


def test_cpu_used_counts_new_processes_and_ignores_ended_ones() -> None:
    assert cpu_used({1: 5.0, 2: 3.0}, {1: 6.5, 3: 0.25}) == 1.75


def test_cpu_per_token_excludes_the_idle_router() -> None:
    assert cpu_per_token(2.0, 10.0, 0.1, 1000) == pytest.approx(0.001)


@pytest.mark.parametrize("capacity", [30.0, 999.0, 1000.0, 5_500.0, 47_000.0])
def test_search_finds_the_capacity(capacity: float) -> None:
    search = RateSearch(1000.0, 100_000.0)
    trials = 0
    while (rate := search.next_rate()) is not None:
        search.record(rate, min(rate, capacity))
        trials += 1
    assert capacity / (RateSearch.PRECISION * 1.01) <= search.best <= capacity
    assert trials <= 15


def test_search_ends_at_its_limit() -> None:
    search, offered = RateSearch(1000.0, 5000.0), []
    while (rate := search.next_rate()) is not None:
        offered.append(rate)
        search.record(rate, rate)
    assert offered == [1000.0, 2000.0, 4000.0, 5000.0]
    assert search.best == 5000.0


def test_search_gives_up_if_no_rate_is_sustained() -> None:
    search = RateSearch(1000.0, 5000.0)
    while (rate := search.next_rate()) is not None:
        search.record(rate, 0.0)
    assert search.best == 0.0


def test_ratios_and_added_times_are_computed_within_each_round() -> None:
    rounds = [
        {DIRECT: sample(7e-6), "ours": sample(40e-6, 0.004), "other": sample(20e-6, burst=0.03)},
        {DIRECT: sample(9e-6), "ours": sample(80e-6, 0.006), "other": sample(60e-6, burst=0.05)},
    ]
    rows = summary(rounds, "ours")
    assert rows["ours"]["cpu_us_per_token"]["median"] == pytest.approx(60)
    assert rows["ours"]["ratio"]["median"] == 1.0
    assert rows["other"]["ratio"]["median"] == pytest.approx((0.5 + 0.75) / 2)
    assert rows["ours"]["added_single_ms"]["median"] == pytest.approx(4)
    assert rows["other"]["added_burst_ms"]["median"] == pytest.approx(30)
    assert rows[DIRECT]["added_single_ms"]["median"] == 0
    assert "max_tokens_per_second" not in rows["ours"]


def test_highest_rates_are_in_the_summary_if_they_were_measured() -> None:
    one = Sample(1e-6, 0.0, 1.0, 0.0, 0.0, max_rate=900.0)
    row = summary([{DIRECT: one, "ours": one}], "ours")["ours"]
    assert row["max_tokens_per_second"]["median"] == 900
    assert math.isfinite(row["ratio"]["median"])
