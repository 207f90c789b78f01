"""`penstock simulate scaling`: compares the autoscaler with others and checks its goals.

For every load and cold start, all scalers get the same arrivals and start with the workers of
static peak capacity (see `load.static_peak`). The product's autoscaler has three goals at a cold
start of 30 s. The number of requests that meet their latency goals must be at least 99% of the
number with static peak capacity. Where the `Case` sets these factors, the worker hours must be at
most `of_peak` times those of static peak capacity, and at most `of_clairvoyant` times those of the
clairvoyant scaler.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.loadtests.bench.flags import option, read_flags
from penstock.loadtests.bench.traces import BadTrace
from penstock.loadtests.bench.workload import Planned
from penstock.loadtests.simulator.model.timing import BadTiming
from penstock.loadtests.simulator.scaling.cluster import Cluster, ClusterPlan
from penstock.loadtests.simulator.scaling.goals import Figures
from penstock.loadtests.simulator.scaling.load import (
    charts_of,
    load_of,
    plan_of,
    print_table,
    simulate,
    static_peak,
)
from penstock.loadtests.simulator.scaling.load_options import Arriving, Kind, Serving, WrongOptions
from penstock.loadtests.simulator.scaling.page import Chart, page

JUDGED_COLD_START = 30.0  # cold start in seconds at which the goals are checked
# Minimum number of requests that meet their goals, relative to static peak capacity.
LEAST_KEPT = 0.99
SCALERS: Sequence[Kind] = ("penstock", "queue", "cpu")
BUSY_FRACTIONS = (1.1, 1.0, 0.9, 0.8, 0.7)
"""Utilizations of the clairvoyant scaler, tried in order until enough requests meet their goals."""
JUDGED = ("static peak", "penstock", "clairvoyant")
TITLE = "penstock simulate scaling"
ABOUT = (
    "Goals: TTFT of at most 2 s plus five times the prompt's prefill time alone, TPOT of at most "
    "twice the time of a decode step alone. Static peak: the fewest static workers for which "
    "99.5% of the requests meet their goals. The clairvoyant scaler knows all arrivals.",
)


@dataclass(frozen=True, slots=True)
class Loads:
    """Traces, and a generated wave and steps."""

    code: Path | None = option(None, "Azure's code trace")  # noqa: RUF009
    conversation: Path | None = option(None, "Azure's conversation trace")  # noqa: RUF009
    mooncake: Path | None = option(None, "a Mooncake trace")  # noqa: RUF009
    copies: float = option(4.0, "multiply the users of the traces by this")
    seconds: float = option(3600.0, "seconds of each trace")
    wave: float = option(7200.0, "seconds per wave, and per two steps; 0: neither load")
    low: float = option(1.0, "lowest rate of wave and steps, requests per second")
    high: float = option(12.0, "highest rate of wave and steps, requests per second")


@dataclass(frozen=True, slots=True)
class Trying:
    """Options of the workers that serve each load."""

    cold_starts: str = option("30", "cold start times in seconds, as 1,30,300")
    most: int = option(32, "most workers")
    timing: Path | None = option(None, "time model: a YAML file")  # noqa: RUF009
    max_batched_tokens: int = option(256, "most tokens per step: with more, prompts delay decodes")
    promised: float = option(2.0, "time-to-first-token SLO of the router, seconds; 0: none")
    page: Path | None = option(None, "write charts to this file, as one HTML page")  # noqa: RUF009


@dataclass(frozen=True, slots=True)
class Case:
    """One load, with the limits on worker hours at a cold start of 30 s."""

    name: str
    arriving: Arriving
    of_peak: float | None = None  # limit as a fraction of the worker hours of static peak capacity
    of_clairvoyant: float | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Returns:
        0 on success, 1 if a goal is missed or requests never end, 2 for wrong options, 130 after
        Ctrl-C.
    """
    about = "Compare the autoscaler with other scalers on several loads and check its goals."
    loads, trying = read_flags("penstock simulate scaling", about, (Loads, Trying), arguments)
    try:
        return _run(cases(loads), trying)
    except (WrongOptions, BadTrace, BadTiming, OSError) as error:
        print(f"penstock simulate scaling: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        print(f"penstock simulate scaling: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def cases(loads: Loads) -> list[Case]:
    """Return the loads to run. Raises WrongOptions if there are none."""
    trace = Arriving(copies=loads.copies, seconds=loads.seconds)
    found = [
        Case(name, replace(trace, trace=path), of_peak, of_clairvoyant)
        for name, path, of_peak, of_clairvoyant in (
            ("code", loads.code, 0.65, None),
            ("conversation", loads.conversation, None, 1.10),
            ("mooncake", loads.mooncake, None, None),
        )
        if path is not None
    ]
    if loads.wave > 0:
        drawn = Arriving(low=loads.low, high=loads.high, period=loads.wave, seconds=loads.wave)
        found.append(Case("wave", drawn, of_peak=0.65))
        found.append(Case("steps", replace(drawn, shape="steps")))
    if not found:
        raise WrongOptions("no load is chosen: give --code, --conversation, --mooncake or --wave")
    return found


def missed(case: Case, peak: Figures, product: Figures, clairvoyant: Figures) -> list[str]:
    """Return a message for each goal that the product's autoscaler missed."""
    wrong = []
    if product.kept < LEAST_KEPT * peak.kept:
        wrong.append(f"keeps {product.kept / peak.kept:.1%} of what static peak capacity keeps")
    if case.of_peak is not None and product.worker_hours > case.of_peak * peak.worker_hours:
        fraction = product.worker_hours / peak.worker_hours
        wrong.append(f"{fraction:.0%} of static peak's worker hours, {case.of_peak:.0%} at most")
    if case.of_clairvoyant is not None:
        fraction = product.worker_hours / clairvoyant.worker_hours
        if fraction > case.of_clairvoyant:
            wrong.append(f"{fraction:.0%} of a clairvoyant's worker hours")
    return wrong


def _run(found: Sequence[Case], trying: Trying) -> int:
    started, failed = time.monotonic(), False
    rows: list[list[str]] = []
    charts: list[Chart] = []
    for case in found:
        for cold_start in _cold_starts(trying.cold_starts):
            played = _play(case, cold_start, trying)
            of = {name: each for name, (_, each) in played.items()}
            rows += [_row(case.name, cold_start, name, of) for name in of]
            title = f"{case.name}, cold start {cold_start:g} s"
            print_table(HEADER, rows[-len(of) :])
            judged = cold_start == JUDGED_COLD_START
            wrong = missed(case, *(of[name] for name in JUDGED)) if judged else []
            failed |= bool(wrong)
            for words in wrong:
                print(f"missed: {title}: {words}", flush=True)
            if trying.page is not None:
                charts += _charts(title, {name: cluster for name, (cluster, _) in played.items()})
                trying.page.write_text(page(TITLE, ABOUT, HEADER, rows, charts), encoding="utf-8")
    print(f"simulated in {time.monotonic() - started:.0f} s")
    return int(failed)


def _charts(title: str, clusters: Mapping[str, Cluster]) -> list[Chart]:
    return [
        replace(chart, title=f"{title}: {chart.title[0].lower()}{chart.title[1:]}")
        for chart in charts_of(clusters)
    ]


def _cold_starts(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 <= seconds <= 3600 for seconds in found):
        raise WrongOptions(
            f"--cold-starts {text!r}: expected seconds from 0 to 3600, such as 1,30,300"
        )
    return found


def _play(case: Case, cold_start: float, trying: Trying) -> dict[str, tuple[Cluster, Figures]]:
    """Run one load with every scaler."""
    serving = Serving(
        most=trying.most,
        cold_start=cold_start,
        timing=trying.timing,
        max_batched_tokens=trying.max_batched_tokens,
        promised=trying.promised,
    )
    load, plan = load_of(case.arriving), plan_of(case.arriving, serving)
    peak = static_peak(load, plan, trying.most)
    plan = replace(plan, pools={"mixed": peak})
    played = {"static peak": simulate("static", load, plan, peak)}
    for kind in SCALERS:
        played[kind] = simulate(kind, load, plan, trying.most)
    enough = LEAST_KEPT * played["static peak"][1].kept
    played["clairvoyant"] = _cheapest_clairvoyant(load, plan, trying.most, enough)
    return played


def _cheapest_clairvoyant(
    load: Sequence[Planned], plan: ClusterPlan, most: int, enough: float
) -> tuple[Cluster, Figures]:
    """Run the clairvoyant scaler at lower and lower utilization.

    Returns the first run in which enough requests meet their goals, or else the last run.
    """
    for busy in BUSY_FRACTIONS:
        cluster, of = simulate("clairvoyant", load, plan, most, busy)
        if of.kept >= enough:
            break
    return cluster, of


HEADER = (
    *("load", "cold start", "scaler", "goals kept", "TTFT p99", "TPOT p99", "worker hours"),
    *("of peak's", "of clairvoyant's", "most workers", "changes/h"),
)


def _row(load: str, cold_start: float, name: str, of: Mapping[str, Figures]) -> list[str]:
    one = of[name]
    return [
        load,
        f"{cold_start:g} s",
        name,
        f"{one.kept:.2%}",
        f"{one.ttft_p99:.2f} s",
        f"{one.tpot_p99 * 1000:.0f} ms",
        f"{one.worker_hours:.2f}",
        f"{one.worker_hours / of['static peak'].worker_hours:.0%}",
        f"{one.worker_hours / of['clairvoyant'].worker_hours:.0%}",
        f"{one.most_workers}",
        f"{one.scalings_an_hour:.0f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
