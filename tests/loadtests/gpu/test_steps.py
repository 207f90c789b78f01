"""Decode steps in `make gpu`: the times and gaps that are computed from their timestamps."""

import pytest

from penstock.loadtests.gpu.clock import HostClock
from penstock.loadtests.gpu.steps import Step, summary


def test_steps_are_timed_from_end_to_end_and_gaps_from_end_to_begin() -> None:
    steps = [Step(begin, begin + 0.008, 100.0) for begin in (0.0, 0.010, 0.020, 0.031)]
    found = summary(steps, HostClock(), floor=0.005)
    assert found["step_us"] == pytest.approx(10_000)
    assert found["over_floor"] == pytest.approx(2.0)
    assert found["gap_p50_us"] == pytest.approx(2_000)
    assert found["gap_p99_us"] == pytest.approx(3_000, rel=0.02)
    assert found["step_p99_us"] == pytest.approx(11_000, rel=0.01)


def test_step_that_begins_when_the_previous_one_ends_leaves_no_gap() -> None:
    steps = [Step(0.0, 0.010, 1.0), Step(0.010, 0.020, 1.0), Step(0.020, 0.030, 1.0)]
    assert summary(steps, HostClock(), 0.01)["gap_p99_us"] == pytest.approx(0, abs=1e-6)
