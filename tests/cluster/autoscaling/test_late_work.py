"""`LateWorkModel`: the work that would have been late at each pool size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.autoscaling.late_work import LateWorkModel

arrivals = st.lists(st.tuples(st.floats(0.5, 60), st.floats(0, 300)), min_size=2, max_size=30)
shares = st.sampled_from([0.0, 0.02, 0.3])


def after(
    arrived: list[tuple[float, float]], most: int = 12, wait: float = 4.0, cold: float = 1e9
) -> LateWorkModel:
    model, now = LateWorkModel(most, wait), 0.0
    model.observe(now, 0.0, cold)
    for seconds, work in arrived:
        now += seconds
        model.observe(now, work, cold)
    return model


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_even_load_needs_as_many_workers_as_it_keeps_busy(workers: int) -> None:
    assert after([(5.0, 5.0 * workers)] * 700).smallest_size(0.02) == workers


def test_burst_may_be_computed_during_its_interval_and_the_allowed_wait() -> None:
    even = [(5.0, 5.0)] * 100
    assert after([*even, (5.0, 45.0), *even]).smallest_size(0.0) == 5, (
        "45 s of work in 5 + 4 seconds"
    )
    assert after([*even, (5.0, 46.0), *even]).smallest_size(0.0) == 6
    assert after([*even, (5.0, 46.0), *even], wait=9.0).smallest_size(0.0) == 4


def test_late_work_is_dropped_and_does_not_delay_later_work() -> None:
    """The late work of a burst is dropped, so two workers complete all later work in time."""
    burst = [(5.0, 100.0), (5.0, 5.0), (5.0, 5.0)]
    lost = 100.0 - 2 * 5.0 - 2 * 4.0
    share = lost / (110.0 * 3600 / 15)
    assert after(burst).smallest_size(1.01 * share) == 2
    assert after(burst).smallest_size(0.95 * share) == 3


def test_load_longer_than_a_cold_start_needs_no_workers_in_advance() -> None:
    """With a cold start of 30 s, only the start of a load of ten minutes is late."""
    even = [(5.0, 2.5)] * 240
    lasting = [*even, *[(5.0, 20.0)] * 120, *even]
    assert after(lasting).smallest_size(0.05) == 4
    assert after(lasting, cold=30.0).smallest_size(0.05) == 1
    bursts = [*[(5.0, 2.5)] * 8, (5.0, 20.0), (5.0, 40.0)] * 60
    assert after(bursts, cold=30.0).smallest_size(0.05) == after(bursts).smallest_size(0.05) > 3


def test_sizes_that_are_always_late_do_not_hide_the_need_for_bursts() -> None:
    bursts = [*[(5.0, 12.0)] * 8, (5.0, 20.0), (5.0, 60.0)] * 60
    assert after(bursts, cold=30.0).smallest_size(0.05) == after(bursts).smallest_size(0.05) > 4


def test_old_work_is_forgotten() -> None:
    quiet = [(5.0, 5.0)] * 2160  # 2,160 intervals of 5 s are three hours
    assert after([(5.0, 300.0)], most=40).smallest_size(0.001) > 1
    assert after([(5.0, 60.0), *quiet]).smallest_size(0.001) == 1


def test_without_work_one_worker_is_enough() -> None:
    assert LateWorkModel(5, 4.0).smallest_size(0.0) == 1
    assert after([(5.0, 0.0)]).smallest_size(0.0) == 1


@given(arrivals, shares, shares)
def test_larger_allowed_late_share_never_needs_more_workers(
    arrived: list[tuple[float, float]], one: float, other: float
) -> None:
    found = after(arrived)
    assert found.smallest_size(max(one, other)) <= found.smallest_size(min(one, other)) <= 12


@given(arrivals, st.integers(2, 4))
def test_multiplied_work_never_needs_fewer_workers(
    arrived: list[tuple[float, float]], users: int
) -> None:
    many = [(seconds, users * work) for seconds, work in arrived]
    assert after(arrived).smallest_size(0.02) <= after(many).smallest_size(0.02)


@given(arrivals, shares)
def test_longer_allowed_wait_never_needs_more_workers(
    arrived: list[tuple[float, float]], share: float
) -> None:
    assert after(arrived, wait=8.0).smallest_size(share) <= after(arrived, wait=4.0).smallest_size(
        share
    )
