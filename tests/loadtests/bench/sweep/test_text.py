"""The lines that a sweep prints, and its conclusion."""

import pytest

from penstock.loadtests.bench.metrics import Goals
from penstock.loadtests.bench.sweep.run import CLIENT_LATE, TOO_FEW_REQUESTS, Result
from penstock.loadtests.bench.sweep.step import Step, step_of
from penstock.loadtests.bench.sweep.text import HEADER, conclusion, plot, step_line
from tests.loadtests.bench.sweep.steps import outcome, step

GOALS = Goals(ttft=1000.0, tpot=50.0)


def test_line_has_a_figure_below_each_heading() -> None:
    line = step_line(step(4.0, 0.25, 0.02))
    assert line.split() == [
        "4",
        "0.2",
        "0.2",
        "0.4",
        "250",
        "250",
        "20.0",
        "20.0",
        "100.0%",
        "kept",
    ]
    ends = [HEADER.index(word) + len(word) for word in ("rate/s", "done/s", "good/s", "tok/s")]
    assert all(line[end - 1] != " " for end in ends)


def test_step_counts_the_requests_that_missed_each_goal() -> None:
    outcomes = [
        outcome(0, 0.1, 0.01),
        outcome(1, 2.0, 0.01),
        outcome(2, 2.0, 0.09),
        outcome(3, 0.0, 0.0, "refused"),
    ]
    missed = step_of(1.0, outcomes, 4.0, GOALS, 0.25)
    assert missed.misses == {"ttft": 2, "tpot": 1, "failed": 1}
    assert missed.worst_goal == "ttft"
    assert missed.attainment == 0.25
    assert missed.has_kept
    assert not step_of(1.0, outcomes, 4.0, GOALS, 0.26).has_kept


def test_step_without_requests_keeps_nothing() -> None:
    assert not step_of(1.0, [], 1.0, GOALS, 0.5).has_kept


def test_plot_marks_the_knee() -> None:
    steps = [step(1.0), step(2.0), step(4.0, 9.0)]
    lines = list(plot(steps, steps[1]))
    assert [line.endswith("knee") for line in lines] == [False, False, True, False]
    assert "#" not in lines[3]
    assert len(lines[3]) > len(lines[1])


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([], "no step was measured"),
        ([step(1.0, 9.0)], "no rate kept the goals (ttft 1 s, tpot 50 ms) for 99% of requests"),
        ([step(1.0)], "knee: 1 requests/s keep ttft 1 s, tpot 50 ms for 99% of requests"),
        (
            [step(1.0), step(2.0, 9.0)],
            "at 2 requests/s the time to first token misses its goal first",
        ),
        # Rate 4 met the goals, but does not count, because the lower rate 2 missed the goals.
        ([step(1.0), step(2.0, 9.0), step(4.0)], "knee: 1 requests/s"),
    ],
)
def test_conclusion_names_the_knee_and_the_goal_that_is_missed(
    steps: list[Step], words: str
) -> None:
    assert words in conclusion(Result(steps), GOALS, 0.99)


@pytest.mark.parametrize("steps", [[step(1.0)], [step(1.0, 9.0)]])
def test_conclusion_does_not_round_the_attainment(steps: list[Step]) -> None:
    assert "for 99.5% of requests" in conclusion(Result(steps), GOALS, 0.995)


@pytest.mark.parametrize("reason", [CLIENT_LATE, TOO_FEW_REQUESTS])
@pytest.mark.parametrize(
    ("steps", "before"),
    [
        ([], "no step was measured: "),
        ([step(4.0, 9.0)], "add prefill workers. The sweep ended early: "),
        ([step(1.0)], "output tokens/s, or more: "),
        ([step(1.0), step(4.0, 9.0)], "output tokens/s, or more: "),
    ],
)
def test_conclusion_says_why_the_sweep_ended_early(
    steps: list[Step], before: str, reason: str
) -> None:
    assert before + reason in conclusion(Result(steps, early_end=reason), GOALS, 0.99)
