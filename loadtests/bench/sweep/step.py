"""One step of a sweep, with its figures and the goals that its requests missed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.loadtests.bench.metrics import Figures, Goals, Outcome, figures


class Step(NamedTuple):
    """Results of the load at one rate."""

    rate: float  # offered rate, in requests per second
    figures: Figures
    # Number of requests that missed each goal; "failed" counts incomplete answers.
    misses: dict[str, int]
    has_kept: bool

    @property
    def num_requests(self) -> int:
        return self.figures.completed + self.figures.failed

    @property
    def attainment(self) -> float:
        """Share of the requests that met all goals."""
        return (self.figures.good or 0) / self.num_requests if self.num_requests else 0.0

    @property
    def worst_goal(self) -> str:
        """Name of the goal that most requests missed, or "" if no request missed a goal."""
        name = max(self.misses, key=lambda each: self.misses[each])
        return name if self.misses[name] else ""


def step_of(
    rate: float, outcomes: Sequence[Outcome], duration: float, goals: Goals, attainment: float
) -> Step:
    """Summarize a load.

    The load keeps the goals if at least `attainment` of its requests meet them.
    """
    measured = figures(outcomes, duration, goals)
    misses = {name: 0 for name in goals.limits()} | {"failed": measured.failed}
    for outcome in outcomes:
        if not outcome.error:
            for name in goals.missed(outcome):
                misses[name] += 1
    total = measured.completed + measured.failed
    has_kept = bool(total) and (measured.good or 0) >= attainment * total
    return Step(rate, measured, misses, has_kept)


def as_json(step: Step) -> dict[str, Any]:
    """Return the fields that a step adds to the results of a load."""
    return {
        "rate": step.rate,
        "kept": step.has_kept,
        "attainment": step.attainment,
        "missed": step.misses,
    }
