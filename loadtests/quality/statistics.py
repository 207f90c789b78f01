"""Paired comparison of two models on the same questions, with bootstrap intervals."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 2000
COVERAGE = 95.0
"""Percentage of the resamples that an interval contains."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with the bounds of its confidence interval."""

    value: float
    low: float
    high: float

    def text(self, digits: int) -> str:
        return f"{self.value:.{digits}f} ({self.low:.{digits}f} to {self.high:.{digits}f})"


@dataclass(frozen=True, slots=True)
class Results:
    """A model's results. Each list has one entry per question, in the same order for all models."""

    right: Floats  # for each question, 1 if the greedy answer is accepted, otherwise 0
    losses: Floats  # sum of the negative log-likelihoods of the expected answer's tokens
    tokens: Floats  # number of tokens of the expected answer

    @property
    def exact_match(self) -> float:
        """Percentage of the questions whose answer is accepted."""
        return 100 * float(self.right.mean())


def compare(found: Results, reference: Results, seed: int = 0) -> tuple[Interval, Interval]:
    """Return the difference in exact match (points) and the ratio of perplexities.

    The bootstrap resamples questions. For each question that a resample contains, it contains the
    results of both models.
    """
    assert np.array_equal(found.tokens, reference.tokens)
    gains, excess = found.right - reference.right, found.losses - reference.losses
    count = len(gains)
    draws = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
    points = 100 * gains[draws].mean(1)
    ratios = np.exp(excess[draws].sum(1) / reference.tokens[draws].sum(1))
    return (
        _interval(100 * float(gains.mean()), points),
        _interval(float(np.exp(excess.sum() / reference.tokens.sum())), ratios),
    )


def _interval(value: float, draws: Floats) -> Interval:
    rest = (100 - COVERAGE) / 2
    low, high = np.percentile(draws, [rest, 100 - rest])
    return Interval(value, float(low), float(high))
