"""Compares simulated latencies with measured ones."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.loadtests.simulator.scaling.page import Chart, Line

TOLERANCE = 0.10
"""Largest accepted relative error of a prediction outside the range of the first two runs."""
PERCENTILES = (50, 90)
HEADER = ("", "measured", "predicted", "error", "spread of two runs", "")


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of one run in seconds, with one entry per request, in order of arrival."""

    due: Sequence[float]
    ttft: Sequence[float]
    tpot: Sequence[float]  # without an entry for an answer of one token


@dataclass(frozen=True, slots=True)
class Row:
    """One figure with its measured values (one per run) and its prediction, in seconds.

    A value is NaN if no request of the run has this latency.
    """

    name: str
    measured: Sequence[float]
    predicted: float

    @property
    def mean(self) -> float:
        return sum(self.measured) / len(self.measured)

    @property
    def error(self) -> float:
        """Relative deviation of the prediction from the mean of the runs; NaN if that is 0."""
        return self.predicted / self.mean - 1 if self.mean else math.nan

    @property
    def difference(self) -> float:
        """Difference between the first two runs, relative to the mean of all runs."""
        low, high = self._range
        return (high - low) / self.mean if self.mean else math.nan

    @property
    def is_met(self) -> bool:
        """Whether the prediction is close to the mean of the runs, or between the first two runs.

        The range of more than two runs is not used, because it grows with the number of runs. A
        figure without samples is never met.
        """
        if not self.mean > 0:
            return False
        low, high = self._range
        return low <= self.predicted <= high or abs(self.error) <= TOLERANCE

    @property
    def _range(self) -> tuple[float, float]:
        """The lower and the higher value of the first two runs."""
        return min(self.measured[:2]), max(self.measured[:2])

    def cells(self) -> list[str]:
        """Return the row as text, in the order of HEADER."""
        return [
            self.name,
            ", ".join(_text(value * 1000, ".1f") for value in self.measured) + " ms",
            _text(self.predicted * 1000, ".1f") + " ms",
            _text(self.error, "+.1%"),
            _text(self.difference, ".1%"),
            "met" if self.is_met else "missed",
        ]


def compare(measured: Sequence[Latencies], predicted: Latencies) -> list[Row]:
    """Return four rows: the median and the p90 of TTFT and of TPOT.

    There are no rows of TPOT if all answers, measured and simulated, have one token.
    """
    rows = []
    for name, title in (("ttft", "TTFT"), ("tpot", "TPOT")):
        if not any(getattr(run, name) for run in (*measured, predicted)):
            continue
        for percentile in PERCENTILES:
            label = f"{title} {'median' if percentile == 50 else f'p{percentile}'}"
            values = [_percentile(getattr(run, name), percentile) for run in measured]
            rows.append(Row(label, values, _percentile(getattr(predicted, name), percentile)))
    return rows


def charts_of(measured: Sequence[Latencies], predicted: Latencies) -> list[Chart]:
    """Return three charts: distribution of TTFT, distribution of TPOT, TTFT by arrival time."""
    runs = {f"measured, run {number}": run for number, run in enumerate(measured, start=1)}
    named = {**runs, "simulated": predicted}
    return [
        Chart(
            "Time to first token, percentiles of the requests",
            "s",
            [Line(name, _distribution(run.ttft)) for name, run in named.items()],
            percent=True,
        ),
        Chart(
            "Time per output token, percentiles of the requests",
            "s",
            [Line(name, _distribution(run.tpot)) for name, run in named.items()],
            percent=True,
        ),
        Chart(
            "Time to first token over the time of arrival",
            "s",
            [Line(name, list(zip(run.due, run.ttft, strict=True))) for name, run in named.items()],
        ),
    ]


def _percentile(values: Sequence[float], percentile: float) -> float:
    return float(np.percentile(values, percentile)) if values else math.nan


def _text(value: float, form: str) -> str:
    return "-" if math.isnan(value) else f"{value:{form}}"


def _distribution(values: Sequence[float]) -> list[tuple[float, float]]:
    """Return the points (percentile, value) of a distribution."""
    points = np.linspace(0, 100, 101)
    drawn = np.percentile(values, points) if values else np.zeros(len(points))
    return list(zip(points.tolist(), drawn.tolist(), strict=True))
