"""Restarts: a first death costs nothing, repeated ones wait longer, hopeless starts end."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.cluster.processes.backoff import (
    FIRST_DELAY,
    FIRST_PAUSE,
    LONGEST_DELAY,
    LONGEST_PAUSE,
    MAX_FAILED_STARTS,
    STEADY_SECONDS,
    GiveUpBackoff,
    RestartBackoff,
)


def test_a_steady_worker_is_replaced_at_once_every_time() -> None:
    record = RestartBackoff()
    assert [record.after_death(STEADY_SECONDS) for _ in range(5)] == [0.0] * 5


def test_deaths_in_a_row_wait_twice_as_long_each() -> None:
    record = RestartBackoff()
    delays = [record.after_death(1.0) for _ in range(20)]
    assert delays[:4] == [0.0, FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY]
    assert delays[-1] == LONGEST_DELAY
    assert record.after_death(STEADY_SECONDS) == 0.0


def test_starts_that_fail_in_a_row_end() -> None:
    record = RestartBackoff()
    delays = [record.after_failed_start() for _ in range(MAX_FAILED_STARTS)]
    assert delays[-1] is None
    assert None not in delays[:-1]


def test_a_start_that_works_clears_the_failed_ones() -> None:
    record = RestartBackoff()
    for _ in range(10):
        assert record.after_failed_start() is not None
        record.after_death(1.0)


def test_what_was_given_up_is_tried_again_with_growing_pauses() -> None:
    record = GiveUpBackoff()
    pauses = [record.after_giving_up(served=False) for _ in range(20)]
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    assert record.after_giving_up(served=True) == FIRST_PAUSE
    assert record.after_giving_up(served=False) == 2 * FIRST_PAUSE


@given(st.lists(st.none() | st.floats(0, 2 * STEADY_SECONDS), max_size=60))
def test_delays_are_bounded_and_never_shrink_without_a_steady_life(
    lives: list[float | None],
) -> None:
    record, last = RestartBackoff(), 0.0
    for lived in lives:
        delay = record.after_failed_start() if lived is None else record.after_death(lived)
        if delay is None:
            return
        assert 0.0 <= delay <= LONGEST_DELAY
        if lived is not None and lived >= STEADY_SECONDS:
            assert delay == 0.0
        else:
            assert delay >= last
        last = delay
