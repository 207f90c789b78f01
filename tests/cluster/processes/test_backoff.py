"""Restart delays: none after a first death, then growing delays; failed starts are limited."""

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


def test_worker_that_ran_long_enough_is_restarted_without_delay() -> None:
    backoff = RestartBackoff()
    assert [backoff.after_death(STEADY_SECONDS) for _ in range(5)] == [0.0] * 5


def test_delay_doubles_with_each_early_death() -> None:
    backoff = RestartBackoff()
    delays = [backoff.after_death(1.0) for _ in range(20)]
    assert delays[:4] == [0.0, FIRST_DELAY, 2 * FIRST_DELAY, 4 * FIRST_DELAY]
    assert delays[-1] == LONGEST_DELAY
    assert backoff.after_death(STEADY_SECONDS) == 0.0


def test_restarts_end_after_too_many_failed_starts() -> None:
    backoff = RestartBackoff()
    delays = [backoff.after_failed_start() for _ in range(MAX_FAILED_STARTS)]
    assert delays[-1] is None
    assert None not in delays[:-1]


def test_successful_start_resets_the_count_of_failed_starts() -> None:
    backoff = RestartBackoff()
    for _ in range(10):
        assert backoff.after_failed_start() is not None
        backoff.after_death(1.0)


def test_pauses_grow_after_each_giving_up() -> None:
    backoff = GiveUpBackoff()
    pauses = [backoff.after_giving_up(served=False) for _ in range(20)]
    assert pauses[:3] == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE]
    assert pauses[-1] == LONGEST_PAUSE
    assert backoff.after_giving_up(served=True) == FIRST_PAUSE
    assert backoff.after_giving_up(served=False) == 2 * FIRST_PAUSE


@given(st.lists(st.none() | st.floats(0, 2 * STEADY_SECONDS), max_size=60))
def test_delays_are_bounded_and_grow_until_a_run_is_long_enough(
    run_times: list[float | None],
) -> None:
    backoff, last = RestartBackoff(), 0.0
    for seconds in run_times:
        delay = backoff.after_failed_start() if seconds is None else backoff.after_death(seconds)
        if delay is None:
            return
        assert 0.0 <= delay <= LONGEST_DELAY
        if seconds is not None and seconds >= STEADY_SECONDS:
            assert delay == 0.0
        else:
            assert delay >= last
        last = delay
