"""StepTimes: records of the latest steps, and the histogram of tokens per step."""

import pytest

from penstock.workers.engine.step_times import MAX_RECORDS, STEP_TOKEN_BOUNDS, StepTimes
from penstock.workers.scheduling.step_work import StepWork


def test_records_have_the_duration_and_the_work_of_each_step() -> None:
    times, work = StepTimes(), [StepWork(9, 2, 30, 20.5), StepWork(2, 2, 32, 0.0)]
    for seconds, each in zip((0.5, 0.25), work, strict=True):
        times.add(seconds, with_prompts=each.pairs > 0)
        times.record(each)
    first, second = times.records()
    assert (first.number, first.seconds, first.work) == (1, 0.5, work[0])
    assert (second.number, second.seconds, second.work) == (2, 0.25, work[1])
    assert first.ended <= second.ended


def test_only_the_latest_records_are_kept() -> None:
    times = StepTimes()
    for _ in range(MAX_RECORDS + 3):
        times.add(0.001, with_prompts=False)
        times.record(StepWork(1, 1, 1, 0.0))
    numbers = [record.number for record in times.records()]
    assert numbers == list(range(4, MAX_RECORDS + 4))


@pytest.mark.parametrize(
    ("num_tokens", "bound"), [(0, 1), (1, 1), (2, 8), (8, 8), (9, 16), (16384, 16384)]
)
def test_tokens_are_counted_in_the_bucket_of_the_lowest_bound_that_holds_them(
    num_tokens: int, bound: int
) -> None:
    times = StepTimes()
    times.add_tokens(num_tokens)
    assert times.num_tokens == num_tokens
    assert times.token_counts()[STEP_TOKEN_BOUNDS.index(bound)] == sum(times.token_counts()) == 1


def test_steps_above_all_bounds_have_a_bucket_of_their_own() -> None:
    times = StepTimes()
    times.add_tokens(16385)
    assert times.token_counts() == (*[0] * len(STEP_TOKEN_BOUNDS), 1)
