"""Figures of the comparison of arrangements: one sample per round, medians and ratios."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.loadtests.bench.metrics import Goals, Outcome, figures
from penstock.loadtests.comparison.arrangements.arrangements import BY_NAME
from penstock.loadtests.micro.ab_runner import Quantiles, checked


@dataclass(frozen=True, slots=True)
class Sample:
    """One arrangement's measurements of one load in one round. Times are in milliseconds."""

    output_per_second: float
    first_median: float
    tpot_median: float
    tpot_p99: float  # 99th percentile, over requests, of a request's mean time per token
    itl_p99: float  # 99th percentile of the gaps between consecutive messages with tokens
    good_per_second: float | None  # requests per second that met the goals; None without goals
    good_fraction: float | None


Rounds = Sequence[Mapping[str, Mapping[str, Sample]]]
"""Samples of each round, by load and by name of the arrangement."""


def sample_of(outcomes: Sequence[Outcome], duration: float, goals: Goals | None) -> Sample:
    """Return the figures of a load. Raises MeasurementFailed if a request failed."""
    found = figures(checked(outcomes), duration, goals)
    return Sample(
        output_per_second=found.per_second(found.total_output),
        first_median=found.ttft.median,
        tpot_median=found.tpot.median,
        tpot_p99=found.tpot.p99,
        itl_p99=found.itl.p99,
        good_per_second=None if found.good is None else found.per_second(found.good),
        good_fraction=None if found.good is None else found.good / max(found.completed, 1),
    )


def summary(rounds: Rounds) -> dict[str, Any]:
    """Return, for each load, the medians of each arrangement and the ratios of the default.

    A ratio is the default's figure divided by that of the best static arrangement. The best
    arrangement is chosen anew for each round and each figure: most tokens per second, earliest
    first token, or most requests that met the goals. The default with SLOs has ratios of its own:
    it is compared only with static arrangements that have SLOs too.
    """
    found: dict[str, Any] = {}
    for load in rounds[0]:
        samples = [each[load] for each in rounds]
        medians = {name: _medians([one[name] for one in samples]) for name in samples[0]}
        found[load] = {"medians": medians, "ratios": _ratios(samples)}
    return found


def _medians(samples: Sequence[Sample]) -> dict[str, float | None]:
    rows = [asdict(each) for each in samples]
    return {
        key: None if rows[0][key] is None else statistics.median(row[key] for row in rows)
        for key in rows[0]
    }


def _ratios(samples: Sequence[Mapping[str, Sample]]) -> dict[str, Any]:
    """Return the ratios of the default and of the default with SLOs, by name of the arrangement."""
    measured = [BY_NAME[name] for name in samples[0]]
    found: dict[str, Any] = {}
    for default in measured:
        static = [one.name for one in measured if one.is_static and one.has_slo == default.has_slo]
        if static and not default.is_static:
            found[default.name] = _ratios_to_best(samples, default.name, static)
    return found


def _ratios_to_best(
    samples: Sequence[Mapping[str, Sample]], default: str, static: Sequence[str]
) -> dict[str, Any]:
    throughput, first, good = [], [], []
    for each in samples:
        ours, others = each[default], [each[name] for name in static]
        throughput.append(ours.output_per_second / max(one.output_per_second for one in others))
        first.append(ours.first_median / min(one.first_median for one in others))
        if ours.good_per_second is not None:
            best = max(one.good_per_second or 0.0 for one in others)
            good.append(ours.good_per_second / best if best else 1.0)
    ratios = {"throughput_ratio": throughput, "first_ratio": first, "good_ratio": good}
    return {key: asdict(Quantiles.of(values)) for key, values in ratios.items() if values}


def table(found: Mapping[str, Any]) -> str:
    """Return the summary as text, with one block per load and one line per arrangement."""
    lines = []
    for load, about in found.items():
        lines.append(
            f"{load:<32}{'tokens/s':>9}{'first ms':>10}{'TPOT ms':>9}{'TPOT p99':>10}"
            f"{'ITL p99':>9}  good"
        )
        for name, row in about["medians"].items():
            good = "" if row["good_fraction"] is None else f"{row['good_fraction']:6.1%}"
            lines.append(
                f"  {BY_NAME[name].title:<30}{row['output_per_second']:>9.0f}"
                f"{row['first_median']:>10.0f}{row['tpot_median']:>9.1f}{row['tpot_p99']:>10.0f}"
                f"{row['itl_p99']:>9.0f}  {good}".rstrip()
            )
        for name, ratios in about["ratios"].items():
            default = BY_NAME[name]
            best = "the best static one with SLOs" if default.has_slo else "the best static one"
            lines += (
                f"  {default.title} relative to {best}, {title}: {Quantiles(**ratios[key])}"
                for key, title in _RATIOS.items()
                if key in ratios
            )
    return "\n".join(lines)


_RATIOS = {
    "throughput_ratio": "tokens/s",
    "first_ratio": "first token",
    "good_ratio": "goodput",
}
