"""Measured times of decode steps, and the choice of one or several workers of a machine."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.worker_load import WorkerLoad
from penstock.router.routing.placement.answer_cost import (
    SHARED_MEMORY_SECONDS,
    AnswerRate,
    StepTimeModel,
    prefers_one_worker,
)

SIZES = st.lists(st.integers(1, 200), min_size=9, max_size=40)
SECONDS = st.floats(1e-4, 1.0)


@given(SIZES, st.floats(1e-3, 1.0), st.floats(0, 1e-2))
def test_a_line_is_recovered(sizes: list[int], fixed: float, slope: float) -> None:
    model = StepTimeModel()
    for size in sizes:
        model.add(size, fixed + slope * size)
    assert model.is_calibrated
    if max(sizes) >= 2 * min(sizes):
        assert model.line()[1] == pytest.approx(slope, rel=1e-3, abs=1e-7)
        assert model.seconds(50) == pytest.approx(fixed + slope * 50, rel=1e-3)
    assert model.seconds(sizes[-1]) == pytest.approx(fixed + slope * sizes[-1], rel=0.5)


@given(st.lists(st.tuples(st.integers(1, 200), SECONDS), max_size=40), st.integers(0, 300))
def test_a_larger_batch_never_takes_less_time(steps: list[tuple[int, float]], size: int) -> None:
    model = StepTimeModel()
    for step in steps:
        model.add(*step)
    assert 0.0 <= model.seconds(size) <= model.seconds(size + 1)


def measured(
    seconds: float, slope: float = 0.0, is_shared: bool = False, rate: AnswerRate | None = None
) -> AnswerRate:
    """Return a rate that has measured twenty decode steps; the last step ended at 20 s."""
    rate = rate or AnswerRate(WorkerLoad(), 0.0)
    total, steps = rate._last.step_seconds, rate._last.num_steps
    for number in range(1, 21):
        running = 1 + number % 4
        total += seconds + slope * running
        load = WorkerLoad(running=running, num_steps=steps + number, step_seconds=total)
        rate.add(load, float(number), is_shared)
    return rate


def both(one: float, others: float, slope: float = 0.0) -> AnswerRate:
    """Return a rate with steps measured alone (`one`) and beside other workers (`others`)."""
    return measured(others, slope, is_shared=True, rate=measured(one, slope / 2))


def test_steps_with_prompts_are_not_decode_steps() -> None:
    rate = AnswerRate(WorkerLoad(), 0.0)
    for number in range(1, 30):
        seconds = float(number)
        load = WorkerLoad(running=2, num_steps=number, step_seconds=seconds, prompt_seconds=seconds)
        rate.add(load, seconds, is_shared=False)
    assert not rate.is_calibrated
    assert rate.prompt_fraction(29.0) > 0.9
    assert rate.prompt_fraction(59.0) < 0.1


@given(st.integers(0, 100), SECONDS, st.floats(0, 0.1))
def test_an_answer_costs_more_on_a_worker_with_more_sequences(
    running: int, seconds: float, slope: float
) -> None:
    rate = measured(seconds, slope)
    cost = rate.seconds_per_token(running, False, 20.0, rate)
    assert seconds * 0.99 <= cost <= rate.seconds_per_token(running + 1, False, 20.0, rate)


def test_an_answer_costs_more_on_a_worker_that_computes_prompts() -> None:
    rate = measured(0.01)
    before = rate.seconds_per_token(3, False, 20.0, rate)
    rate.add(rate._last._replace(prompt_seconds=5.0, num_steps=30, step_seconds=9.0), 30.0, False)
    assert rate.seconds_per_token(3, False, 30.0, rate) > 1.2 * before


def test_unmeasured_case_is_that_of_the_other_one() -> None:
    rate = measured(0.02)
    shared = rate.seconds_per_token(0, True, 20.0, rate)
    assert shared == rate.seconds_per_token(0, False, 20.0, rate) == pytest.approx(0.02)


def test_one_worker_is_preferred_if_its_steps_are_faster_for_all_sequences() -> None:
    # If all four sequences are on one worker, a step takes 10 + 4 * 1 ms.
    # If two workers have two sequences each, a step takes 20 + 2 * 2 ms.
    fast = [both(0.010, 0.020, 0.002), both(0.010, 0.020, 0.002)]
    assert prefers_one_worker(fast, [2, 1], 20.0)
    # Steps are as fast beside another worker as alone, so several workers are preferred.
    apart = [both(0.010, 0.010), both(0.010, 0.010)]
    assert not prefers_one_worker(apart, [2, 1], 20.0)
    # Steps on a single worker are only slightly faster, so several workers are still preferred.
    even = [both(0.010, 0.011), both(0.010, 0.011)]
    assert not prefers_one_worker(even, [2, 1], 20.0)


def test_one_worker_is_not_preferred_for_batches_larger_than_measured() -> None:
    fast = [both(0.010, 0.020), both(0.010, 0.020)]
    assert prefers_one_worker(fast, [3, 2], 20.0)
    assert not prefers_one_worker(fast, [16, 16], 20.0)


def test_one_worker_is_not_preferred_before_both_cases_are_measured() -> None:
    assert not prefers_one_worker([], [], 20.0)
    assert not prefers_one_worker([both(0.01, 0.02)], [1], 20.0)
    assert not prefers_one_worker([measured(0.01)] * 2, [1, 1], 20.0)
    assert not prefers_one_worker([measured(0.01, is_shared=True)] * 2, [1, 1], 20.0)


def test_several_workers_are_tried_again_after_some_time() -> None:
    rates = [both(0.01, 0.02), both(0.01, 0.02)]
    assert prefers_one_worker(rates, [1, 0], 20.0 + SHARED_MEMORY_SECONDS / 2)
    assert not prefers_one_worker(rates, [1, 0], 20.0 + SHARED_MEMORY_SECONDS)
