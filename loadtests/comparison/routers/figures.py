"""Arithmetic of the comparison of routers.

Computes CPU time per token and ratios, and searches for the highest rate.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.loadtests.micro.ab_runner import Quantiles

DIRECT = "direct"
"""Name of the target without a router: clients send their requests directly to the stub."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One router's measurements of one round. Times are in seconds."""

    cpu_per_token: float  # CPU time per token, without that of the idle router
    idle_cores: float  # average number of cores that the idle router uses
    writes_per_token: float  # 1 if the router wrote every token separately
    first_single: float  # median time to the first token of requests that run alone
    first_burst: float  # median time to the first token of streams that start together
    max_rate: float | None = None  # highest sustained tokens per second; None if not measured


def cpu_used(before: Mapping[int, float], after: Mapping[int, float]) -> float:
    """Return the CPU time that a process tree used between two readings.

    A process that started after the first reading counts in full. A process that ended before the
    second reading does not count.
    """
    return sum(seconds - before.get(pid, 0.0) for pid, seconds in after.items())


def cpu_per_token(used: float, seconds: float, idle_cores: float, num_tokens: int) -> float:
    """Return the CPU time per token.

    The CPU time that the idle router uses in the same time is subtracted.
    """
    return (used - idle_cores * seconds) / num_tokens


class RateSearch:
    """Searches for the highest rate that a router sustains.

    If the router sustains the first rate, the search doubles the rate until the router no longer
    sustains it. Otherwise the search halves the rate until the router sustains it. The search then
    halves the interval between the highest sustained and the lowest other rate, on a logarithmic
    scale.

    Args:
        start: first rate to try, in tokens per second.
        limit: highest rate to try.
    """

    PRECISION = 1.1  # the search ends when the ratio of the interval's bounds is at most this
    SUSTAINED = 0.95  # fraction of an offered rate that must be achieved to sustain it
    LEAST = 10.0  # rate below which the search ends without a result

    def __init__(self, start: float, limit: float) -> None:
        self.best = 0.0  # highest achieved rate of the trials that were sustained
        self._start, self._limit = start, limit
        self._low: float | None = None  # highest offered rate that was sustained
        self._high: float | None = None  # lowest offered rate that was not sustained

    def next_rate(self) -> float | None:
        """Return the rate to offer next, or None at the end of the search."""
        low, high = self._low, self._high
        if high is None:
            rate = self._start if low is None else min(2 * low, self._limit)
            return None if rate == low else rate
        if low is None:
            return high / 2 if high / 2 >= self.LEAST else None
        return math.sqrt(low * high) if high / low > self.PRECISION else None

    def record(self, offered: float, achieved: float) -> None:
        """Add the result of a trial at the rate that `next_rate` returned."""
        if achieved >= self.SUSTAINED * offered:
            self._low = offered
            self.best = max(self.best, achieved)
        else:
            self._high = offered


def summary(rounds: Sequence[Mapping[str, Sample]], reference: str) -> dict[str, dict[str, Any]]:
    """Return medians and 10th and 90th percentiles of the rounds, by router.

    Ratios and added times are computed within each round. `ratio` is the router's CPU time per
    token relative to that of the reference. Added times are relative to the stub without a router.
    """
    rows = {}
    for name in rounds[0]:
        samples = [round_[name] for round_ in rounds]
        direct = [round_[DIRECT] for round_ in rounds]
        cpu = [1e6 * sample.cpu_per_token for sample in samples]
        by = [1e6 * round_[reference].cpu_per_token for round_ in rounds]
        figures = {
            "cpu_us_per_token": cpu,
            "ratio": [mine / other for mine, other in zip(cpu, by, strict=True)],
            "added_single_ms": [
                1e3 * (sample.first_single - base.first_single)
                for sample, base in zip(samples, direct, strict=True)
            ],
            "added_burst_ms": [
                1e3 * (sample.first_burst - base.first_burst)
                for sample, base in zip(samples, direct, strict=True)
            ],
        }
        rates = [sample.max_rate for sample in samples if sample.max_rate is not None]
        if rates:
            figures["max_tokens_per_second"] = rates
        row: dict[str, Any] = {key: asdict(Quantiles.of(value)) for key, value in figures.items()}
        row["writes_per_token"] = statistics.median(each.writes_per_token for each in samples)
        row["idle_cores"] = statistics.median(each.idle_cores for each in samples)
        rows[name] = row
    return rows
